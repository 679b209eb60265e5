"""The processes that use torch: workers that train, the probe's measurements of devices and messages, the checks of
the selfcheck, and commands that evaluate, export or describe a model."""
