"""The gates as pytest suites, with the bundled campaigns and criteria beside them."""
