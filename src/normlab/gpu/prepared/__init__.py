"""Calls of a layer prepared for inputs of one shape, dtype and layout.

On all but large inputs a call costs the host more than the device. So whatever depends on shapes and options alone is
worked out once.
"""
