"""LASER: tokens with flat scores go to the least loaded of their viable experts."""

from capmoe_eval.extensions.laser.method import Laser as Laser
