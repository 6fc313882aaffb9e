"""The console script: runs gradfilter/cli.py without importing its package first.

`import gradfilter` loads torch, which takes seconds; help and mistyped options need not wait.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path


def main() -> int:
    if "gradfilter" in sys.modules:
        from gradfilter import cli
    else:
        (folder,) = find_spec("gradfilter").submodule_search_locations
        spec = spec_from_file_location("gradfilter.cli", Path(folder, "cli.py"))
        cli = sys.modules["gradfilter.cli"] = module_from_spec(spec)
        spec.loader.exec_module(cli)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
