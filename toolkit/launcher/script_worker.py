"""One rank of a run that is not the recipe: a module, a script or a shipped function, with the run's folder and logs.

Started as `python -m toolkit.launcher.script_worker FOLDER KIND NAME SHA256 [ARGUMENTS…]`.
"""

from __future__ import annotations

# First, so that a rank ends with its launcher even while it imports torch.
from toolkit.core.process_lifecycle import die_with_parent, leave_safe_path

if __name__ == "__main__":
    die_with_parent()
    leave_safe_path()

import os
import runpy
import sys
import traceback
from pathlib import Path

from toolkit.core.errors import ToolkitError
from toolkit.core.rank_output import tee_output
from toolkit.engines.upstream import wait_for_workers
from toolkit.launcher.targets import Target, load_function
from toolkit.run_folder.folder import Folder, enter
from toolkit.run_folder.run_lock import supervised
from toolkit.training.metrics import RUN_DIR


def host(path: Path, target: Target) -> int:
    """Run the target as this rank; its exit code. What ends it otherwise is left for the supervisor."""
    rank = int(os.environ.get("RANK", "0"))
    with enter(path, resume=True) as folder:
        tee_output(folder.log(rank), rank=rank, supervised=supervised(), token=folder.token)
        os.environ[RUN_DIR] = str(path.absolute())  # the target may go elsewhere
        with folder.room_for_error(rank):
            try:
                _run(folder, target)
            except SystemExit as error:
                if error.code in (None, 0):
                    return 0
                print(error.code, file=sys.stderr)
                return error.code if isinstance(error.code, int) else 1
            except BaseException as error:
                traceback.print_exc()
                folder.record_error(rank, error)
                return error.exit_code if isinstance(error, ToolkitError) else 1
    return 0


def _run(folder: Folder, target: Target) -> None:
    if target.kind == "function":
        function, args, kwargs = load_function(folder.function, target.sha256)
        function(*args, **kwargs)
    elif target.kind == "script":
        sys.argv = [target.name, *target.arguments]
        sys.path.insert(0, str(Path(target.name).parent))
        runpy.run_path(target.name, run_name="__main__")
    else:
        sys.argv = [target.name, *target.arguments]
        sys.path.append(os.getcwd())  # last: a file there takes no library's place
        runpy.run_module(target.name, run_name="__main__", alter_sys=True)


def main(arguments: list[str]) -> int:
    """Run the target of the module's docstring."""
    path, kind, name, sha256, *rest = arguments
    return host(Path(path), Target(kind=kind, name=name, sha256=sha256, arguments=tuple(rest)))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    wait_for_workers()  # a script may use plain Accelerate
    sys.exit(code)
