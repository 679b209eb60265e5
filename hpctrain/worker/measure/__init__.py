"""What the probe measures of a device with torch: speed, memory, codecs and messages."""
