"""A script without DistributedDataParallel; its exit code and arguments are its own."""

import sys

print("arguments", sys.argv[1:], __name__, sys.path[0])
sys.exit(int(sys.argv[1]))
