import sys

from gradfilter.cli import main

sys.exit(main())
