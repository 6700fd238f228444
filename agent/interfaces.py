"""Which network interface has an address: engines of a gang are told, as left to themselves they may take a bridge."""

import ipaddress
import socket

import psutil


def interface_of(address: str) -> str:
    """Its name; empty where no interface of this machine has the address, or the host's name cannot be looked up."""
    try:
        wanted = ipaddress.ip_address(_numeric(address))
    except (OSError, ValueError):
        return ""
    near = ""
    for name, found in psutil.net_if_addrs().items():
        for one in found:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            has = ipaddress.ip_address(one.address.partition("%")[0])
            if has == wanted:
                return name
            if has.is_loopback and wanted.is_loopback:
                near = name  # all of 127/8 is there, and is not listed
    return near


def _numeric(address: str) -> str:
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return str(socket.getaddrinfo(address, None)[0][4][0])
