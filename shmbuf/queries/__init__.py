"""Trajectories by predicate: the language `traj`, what a `Trajectory` is, where one begins and ends."""
