//! The dialler's half of a connection's start: connect, say what it is, read the answer.

use std::io;
use std::net::SocketAddr;

use mio::{Registry, Token};

use super::config::TcpConfig;
use super::preamble::{PREAMBLE_LEN, Preamble, REPLY_LEN, Reply};
use super::socket::{self, Stream};

/// A connection that is being made.
pub(super) struct Dial {
    pub(super) stream: Stream,
    connected: bool,
    preamble: [u8; PREAMBLE_LEN],
    sent: usize,
    reply: [u8; REPLY_LEN],
    got: usize,
}

impl Dial {
    pub(super) fn start(
        address: SocketAddr,
        preamble: &Preamble,
        config: &TcpConfig,
        registry: &Registry,
        token: Token,
    ) -> io::Result<Dial> {
        let stream = Stream::watch(socket::dial(address, config)?, registry, token)?;
        let preamble = preamble.encode();
        Ok(Dial { stream, connected: false, preamble, sent: 0, reply: [0; REPLY_LEN], got: 0 })
    }

    /// Goes on as far as the socket lets it; the answer once it is there.
    pub(super) fn drive(&mut self) -> Result<Option<Reply>, String> {
        self.step().map_err(|error| error.to_string())?;
        if self.got < REPLY_LEN {
            return Ok(None);
        }
        Reply::decode(&self.reply).map(Some).map_err(|error| format!("the peer: {error}"))
    }

    fn step(&mut self) -> io::Result<()> {
        if !self.connected {
            if let Some(error) = self.stream.io.take_error()? {
                return Err(error);
            }
            match self.stream.io.peer_addr() {
                Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(()),
                other => other?,
            };
            self.connected = true;
        }
        while self.sent < PREAMBLE_LEN {
            match self.stream.write(&self.preamble[self.sent..])? {
                Some(sent) => self.sent += sent,
                None => return Ok(()),
            }
        }
        while self.got < REPLY_LEN {
            match self.stream.read(&mut self.reply[self.got..])? {
                Some(0) => return Err(io::Error::other("the peer closed it at once")),
                Some(got) => self.got += got,
                None => return Ok(()),
            }
        }
        Ok(())
    }
}
