"""``python -m benchmarks.attention``; see `benchmarks.attention.run`."""

import sys

from benchmarks.attention.run import main

sys.exit(main())
