"""`python …/start.py MODULE …`: does what `python -m MODULE …` does, without the current folder on the module path.

`-m` and `-c` search the current folder first, before the standard library: another user's `random.py` in a shared
folder would run as you. Python's option `-P` turns that off, but exists only from Python 3.11 on. For a script, Python
searches the script's folder instead of the current one; `start.py` removes that entry before it imports anything but
built-in modules.
"""

import sys

if __name__ == "__main__":
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]  # this folder, which holds modules of hpctrain by their short names
    del sys.argv[0]

    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
