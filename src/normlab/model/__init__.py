"""Functions of whole models: conversion, folding, fusing, calibration, routing, state."""
