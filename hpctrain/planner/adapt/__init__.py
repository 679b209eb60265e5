"""Decisions to plan again while a run trains: how fast each device was, whether that changed, whether a new plan is
worth its price, and whether it kept its promise. Pure functions of a run's rows.
"""
