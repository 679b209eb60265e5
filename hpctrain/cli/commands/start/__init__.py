"""Commands that start a run or continue one."""
