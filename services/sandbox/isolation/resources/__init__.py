"""Resources of jails: limits, slots, control groups, users, scratch directories."""
