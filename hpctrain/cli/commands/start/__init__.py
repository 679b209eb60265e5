"""Commands that start a run or go on with one."""
