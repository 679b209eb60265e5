"""Adaptations of a run's plan: finds how fast each device was and whether its speed changed, whether another plan saves
more time than the change of plan costs, and whether steps then took as long as predicted. Pure functions of a run's
rows.
"""
