//! On loopback sockets.
