"""``python -m benchmarks.schedule``; see `benchmarks.schedule.run`."""

import sys

from benchmarks.schedule.run import main

sys.exit(main())
