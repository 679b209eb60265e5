"""What the kernel and the file system of this machine say, and settings of this process in the kernel."""
