"""Load from a schedule, measured request by request. The way in is `driver.LoadClient`."""
