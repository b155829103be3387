"""When a rank fails all the same: what it says before its end, and how the others come free and save what is whole."""
