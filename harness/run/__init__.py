"""Whatever acts on run directories: running a campaign, cleaning up after one, judging one."""
