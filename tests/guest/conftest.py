"""What lies below `inside` runs in the guest."""

collect_ignore = ["inside"]
