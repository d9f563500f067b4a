//! The first bytes of every connection, the answer to them, and the parameters that two ends of a
//! lane exchange over their control link beforehand. All of fixed length, all parsed whole.
//!
//! A lane's connection proves by a fresh secret that it belongs to the link: whoever dials shows
//! the token that the other side made, and the answer shows the dialler's own.

use crate::protocol::LaneId;
use crate::transport::{LaneRole, LinkId, TransportError};

/// Bytes of a preamble.
pub const PREAMBLE_LEN: usize = 48;
/// Bytes of the answer.
pub const REPLY_LEN: usize = 24;
/// Bytes of a lane's parameters.
pub const PARAMS_LEN: usize = 44;

/// The version of what this provider puts on its connections.
const VERSION: u16 = 1;
const MAGIC: [u8; 4] = *b"SLFT";
const REPLY_MAGIC: [u8; 4] = *b"SLFR";

const KIND_CONTROL: u8 = 1;
const KIND_LANE: u8 = 2;

/// A lane's secret: fresh for every lane and side, and good for one connection.
#[derive(Clone, Copy)]
pub struct Secret([u8; 16]);

impl Secret {
    /// A new secret from the system's random source.
    pub fn new() -> Result<Secret, TransportError> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|error| TransportError::System {
            what: "drawing a lane's secret",
            why: error.to_string(),
        })?;
        Ok(Secret(bytes))
    }

    /// Compares in a time that doesn't depend on where the two differ.
    pub fn matches(&self, other: &Secret) -> bool {
        let differing = self.0.iter().zip(other.0).fold(0, |sum, (a, b)| sum | (a ^ b));
        std::hint::black_box(differing) == 0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What a connection says it is.
#[derive(Clone, Copy, Debug)]
pub enum Preamble {
    /// A new control link.
    Control,
    /// One end of a lane.
    Lane {
        /// The link, as the side that is dialled numbers it.
        link: LinkId,
        /// The lane.
        lane: LaneId,
        /// What the dialler is in it.
        dialler: LaneRole,
        /// The secret of the side that is dialled.
        secret: Secret,
    },
}

/// What is wrong with a preamble, an answer or lane parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PreambleError {
    /// It isn't this protocol.
    #[error("it does not speak this protocol")]
    Magic,
    /// A version that isn't spoken here.
    #[error("it speaks version {0} of the connection format, here it is {VERSION}")]
    Version(u16),
    /// An unknown kind, role or status.
    #[error("field value {0} is unknown")]
    Unknown(u8),
    /// A field that must be zero isn't.
    #[error("a reserved field is set")]
    Reserved,
    /// Of another length.
    #[error("it is {0} bytes long")]
    Length(usize),
}

fn encode_role(role: LaneRole) -> u8 {
    match role {
        LaneRole::Reader => 1,
        LaneRole::Writer => 2,
    }
}

fn decode_role(byte: u8) -> Result<LaneRole, PreambleError> {
    match byte {
        1 => Ok(LaneRole::Reader),
        2 => Ok(LaneRole::Writer),
        other => Err(PreambleError::Unknown(other)),
    }
}

/// The other end's role.
pub fn opposite(role: LaneRole) -> LaneRole {
    match role {
        LaneRole::Reader => LaneRole::Writer,
        LaneRole::Writer => LaneRole::Reader,
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn check_version(magic: [u8; 4], version: [u8; 2], want: [u8; 4]) -> Result<(), PreambleError> {
    if magic != want {
        return Err(PreambleError::Magic);
    }
    match u16::from_le_bytes(version) {
        VERSION => Ok(()),
        other => Err(PreambleError::Version(other)),
    }
}

/// Writes what a preamble and lane parameters share, from byte `at` on: 34 bytes.
fn put_lane(bytes: &mut [u8], at: usize, link: LinkId, lane: LaneId, secret: &Secret) {
    bytes[at..at + 8].copy_from_slice(&link.0.to_le_bytes());
    bytes[at + 8..at + 16].copy_from_slice(&lane.epoch.to_le_bytes());
    bytes[at + 16..at + 18].copy_from_slice(&lane.index.to_le_bytes());
    bytes[at + 18..at + 34].copy_from_slice(&secret.0);
}

fn get_lane(bytes: &[u8], at: usize) -> (LinkId, LaneId, Secret) {
    let link = LinkId(u64::from_le_bytes(array(bytes, at)));
    let epoch = u64::from_le_bytes(array(bytes, at + 8));
    let index = u16::from_le_bytes(array(bytes, at + 16));
    (link, LaneId { index, epoch }, Secret(array(bytes, at + 18)))
}

impl Preamble {
    /// As bytes.
    pub fn encode(&self) -> [u8; PREAMBLE_LEN] {
        let mut bytes = [0; PREAMBLE_LEN];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        match self {
            Preamble::Control => bytes[6] = KIND_CONTROL,
            Preamble::Lane { link, lane, dialler, secret } => {
                bytes[6] = KIND_LANE;
                bytes[7] = encode_role(*dialler);
                put_lane(&mut bytes, 8, *link, *lane, secret);
            }
        }
        bytes
    }

    /// From bytes.
    pub fn decode(bytes: &[u8; PREAMBLE_LEN]) -> Result<Preamble, PreambleError> {
        check_version(array(bytes, 0), array(bytes, 4), MAGIC)?;
        let zero_from = if bytes[6] == KIND_CONTROL { 7 } else { 42 };
        if bytes[zero_from..].iter().any(|&byte| byte != 0) {
            return Err(PreambleError::Reserved);
        }
        match bytes[6] {
            KIND_CONTROL => Ok(Preamble::Control),
            KIND_LANE => {
                let (link, lane, secret) = get_lane(bytes, 8);
                Ok(Preamble::Lane { link, lane, dialler: decode_role(bytes[7])?, secret })
            }
            other => Err(PreambleError::Unknown(other)),
        }
    }
}

/// The answer to a preamble.
#[derive(Clone, Copy, Debug)]
pub enum Reply {
    /// The connection stands. For a lane, with the dialler's secret; for a link, with zeros.
    Welcome(Secret),
    /// As many links as this side takes.
    Full,
    /// No such lane, or the wrong secret; which of them is nobody's business.
    Refused,
}

impl Reply {
    /// For a control link.
    pub const LINK: Reply = Reply::Welcome(Secret([0; 16]));

    /// As bytes.
    pub fn encode(&self) -> [u8; REPLY_LEN] {
        let mut bytes = [0; REPLY_LEN];
        bytes[0..4].copy_from_slice(&REPLY_MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        match self {
            Reply::Welcome(secret) => {
                bytes[6] = 1;
                bytes[8..24].copy_from_slice(&secret.0);
            }
            Reply::Full => bytes[6] = 2,
            Reply::Refused => bytes[6] = 3,
        }
        bytes
    }

    /// From bytes.
    pub fn decode(bytes: &[u8; REPLY_LEN]) -> Result<Reply, PreambleError> {
        check_version(array(bytes, 0), array(bytes, 4), REPLY_MAGIC)?;
        match bytes[6] {
            1 => Ok(Reply::Welcome(Secret(array(bytes, 8)))),
            2 => Ok(Reply::Full),
            3 => Ok(Reply::Refused),
            other => Err(PreambleError::Unknown(other)),
        }
    }
}

/// What one end of a lane must know of the other.
#[derive(Clone, Copy, Debug)]
pub struct LaneParams {
    /// What the end that made this is in the lane.
    pub role: LaneRole,
    /// The link, as that end numbers it.
    pub link: LinkId,
    /// The lane.
    pub lane: LaneId,
    /// That end's secret.
    pub secret: Secret,
}

impl LaneParams {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; PARAMS_LEN];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = encode_role(self.role);
        put_lane(&mut bytes, 8, self.link, self.lane, &self.secret);
        bytes
    }

    /// From bytes.
    pub fn decode(bytes: &[u8]) -> Result<LaneParams, PreambleError> {
        if bytes.len() != PARAMS_LEN {
            return Err(PreambleError::Length(bytes.len()));
        }
        check_version(array(bytes, 0), array(bytes, 4), MAGIC)?;
        if bytes[7] != 0 || bytes[42..] != [0, 0] {
            return Err(PreambleError::Reserved);
        }
        let (link, lane, secret) = get_lane(bytes, 8);
        Ok(LaneParams { role: decode_role(bytes[6])?, link, lane, secret })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LANE: LaneId = LaneId { index: 3, epoch: 0x0102_0304_0506_0708 };

    #[test]
    fn what_is_sent_is_what_is_read() {
        let secret = Secret([9; 16]);
        let sent =
            Preamble::Lane { link: LinkId(77), lane: LANE, dialler: LaneRole::Writer, secret };
        let Ok(Preamble::Lane { link, lane, dialler, secret: seen }) =
            Preamble::decode(&sent.encode())
        else {
            panic!("a lane's preamble is read as one")
        };
        assert_eq!((link, lane, dialler), (LinkId(77), LANE, LaneRole::Writer));
        assert!(seen.matches(&secret) && !seen.matches(&Secret([8; 16])));
        let control = Preamble::decode(&Preamble::Control.encode());
        assert!(matches!(control, Ok(Preamble::Control)));
        let params = LaneParams { role: LaneRole::Reader, link: LinkId(5), lane: LANE, secret };
        let seen = LaneParams::decode(&params.encode()).unwrap();
        assert_eq!((seen.role, seen.link, seen.lane), (LaneRole::Reader, LinkId(5), LANE));
        assert!(seen.secret.matches(&secret));
        assert_eq!(format!("{secret:?}"), "Secret(..)", "secrets don't get into logs");
    }

    #[test]
    fn other_protocols_and_versions_are_told_apart() {
        let mut bytes = Preamble::Control.encode();
        bytes[4] = 2;
        assert_eq!(Preamble::decode(&bytes).unwrap_err(), PreambleError::Version(2));
        bytes[0] = b'G';
        assert_eq!(Preamble::decode(&bytes).unwrap_err(), PreambleError::Magic);
        let mut bytes = Preamble::Control.encode();
        bytes[47] = 1;
        assert_eq!(Preamble::decode(&bytes).unwrap_err(), PreambleError::Reserved);
        assert_eq!(LaneParams::decode(&[0; 3]).unwrap_err(), PreambleError::Length(3));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(mut bytes in any::<[u8; PREAMBLE_LEN]>(), tame in any::<bool>()) {
            if tame {
                bytes[..6].copy_from_slice(&Preamble::Control.encode()[..6]);
            }
            let _ = Preamble::decode(&bytes);
            let _ = LaneParams::decode(&bytes[..PARAMS_LEN]);
            let _ = Reply::decode(&array(&bytes, 0));
        }
    }
}
