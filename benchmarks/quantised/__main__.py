"""``python -m benchmarks.quantised``; see `benchmarks.quantised.run`."""

import sys

from benchmarks.quantised.run import main

sys.exit(main())
