"""What the kernel and the file system of this machine say, and settings that this process makes in the kernel."""
