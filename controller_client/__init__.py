"""All that speaks to, or lives beside, a SkyServe controller."""
