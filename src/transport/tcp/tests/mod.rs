//! The provider on real loopback sockets: two transports, or one and a peer played by hand.

mod control;
mod fence;
mod hostile;
mod landing;
mod lanes;
mod lifetime;
mod rig;
