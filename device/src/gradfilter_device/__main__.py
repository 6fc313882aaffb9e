import sys

from gradfilter_device.cli import main

sys.exit(main())
