"""Import this folder as a package, although it is run by path, and leave no trace of that on the module path."""

import importlib
import os
import sys

if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(folder)
    program = importlib.import_module(os.path.basename(folder) + ".main")
    del sys.path[0]
    program.main()
