"""What acts on whole models: conversion, folding, fusing, calibration, routing, state."""
