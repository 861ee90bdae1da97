"""``python -m benchmarks.serving``; see `benchmarks.serving.run`."""

import sys

from benchmarks.serving.run import main

sys.exit(main())
