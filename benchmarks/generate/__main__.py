"""``python -m benchmarks.generate``; see `benchmarks.generate.run`."""

import sys

from benchmarks.generate.run import main

sys.exit(main())
