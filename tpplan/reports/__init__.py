"""What commands report, as frozen classes that become JSON; :mod:`tpplan.render` makes them text."""
