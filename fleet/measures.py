"""What a node's own measurement must not say: no plan can be made on what contradicts itself."""

from collections import Counter

from fleet.state import Inventory


def contradiction(inventory: Inventory) -> str:
    """One sentence on the first thing that cannot be; empty where there is none.

    What is merely hard to believe is taken: a device of any size, more held by others than there is.
    """
    for uuid, count in Counter(device.uuid for device in inventory.devices).items():
        if not uuid:
            return "a device has no uuid: what is placed on it could not be told from the others"
        if count > 1:
            return f"{count} devices have the uuid {uuid}: give each its own, or memory would be counted {count} times"
    for device in inventory.devices:
        if device.total < 0:
            return f"device {device.uuid} has {device.total} bytes in all, which is less than nothing"
    return ""
