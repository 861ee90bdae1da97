"""``python -m benchmarks.step``; see `benchmarks.step.run`."""

import sys

from benchmarks.step.run import main

sys.exit(main())
