"""What the device did: traces read into columns. numpy and msgspec; no torch."""
