"""``python -m benchmarks.memory``; see `benchmarks.memory.run`."""

import sys

from benchmarks.memory.run import main

sys.exit(main())
