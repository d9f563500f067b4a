//! Sockets: made, tuned, and watched for readiness.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::os::fd::{AsFd, BorrowedFd};

use mio::{Interest, Registry, Token};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::config::TcpConfig;
use super::preamble::{REPLY_LEN, Reply};
use crate::transport::TransportError;

/// A connection that one I/O thread watches. Readiness is edge-triggered: a flag is set by the
/// poll and cleared by whoever meets `WouldBlock`.
pub(super) struct Stream {
    pub(super) io: mio::net::TcpStream,
    pub(super) token: Token,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// It waits in its thread's queue to be served.
    pub(super) queued: bool,
}

impl Stream {
    /// Watches `io` under `token`.
    pub(super) fn watch(
        mut io: mio::net::TcpStream,
        registry: &Registry,
        token: Token,
    ) -> io::Result<Stream> {
        registry.register(&mut io, token, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Stream { io, token, readable: false, writable: false, queued: false })
    }

    /// Runs a read until it isn't interrupted; `None` if nothing is there.
    pub(super) fn read_with<T>(
        &mut self,
        mut read: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<Option<T>> {
        let result = uninterrupted(|| read(self.io.as_fd()))?;
        self.readable = result.is_some();
        Ok(result)
    }

    /// Runs a write until it isn't interrupted; `None` if nothing more fits.
    pub(super) fn write_with<T>(
        &mut self,
        mut write: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<Option<T>> {
        let result = uninterrupted(|| write(self.io.as_fd()))?;
        self.writable = result.is_some();
        Ok(result)
    }

    /// Reads into `buf`; `None` if nothing is there, 0 at the end of the stream.
    pub(super) fn read(&mut self, buf: &mut [u8]) -> io::Result<Option<usize>> {
        use std::io::Read as _;
        let result = uninterrupted(|| self.io.read(buf))?;
        self.readable = result.is_some();
        Ok(result)
    }

    /// Writes from `buf`; `None` if nothing more fits. Never raises SIGPIPE.
    pub(super) fn write(&mut self, buf: &[u8]) -> io::Result<Option<usize>> {
        self.write_with(|fd| SockRef::from(&fd).send_with_flags(buf, libc::MSG_NOSIGNAL))
    }

    /// Makes the coming close abortive: what is queued in the kernel is thrown away.
    pub(super) fn abort_on_close(&self) {
        // Best effort: without it the kernel sends a little more.
        let _ = SockRef::from(&self.io).set_linger(Some(std::time::Duration::ZERO));
    }
}

fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<Option<T>> {
    loop {
        match call() {
            Ok(value) => return Ok(Some(value)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

/// Starts a connection without waiting for it.
pub(super) fn dial(address: SocketAddr, config: &TcpConfig) -> io::Result<mio::net::TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    // Before the connect: the window scale is settled by it.
    set_buffers(&socket, config)?;
    tune(SockRef::from(&socket), config)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        other => other?,
    }
    Ok(mio::net::TcpStream::from_std(socket.into()))
}

/// Answers an accepted connection, which has nothing else queued.
pub(super) fn send_reply(io: &mio::net::TcpStream, reply: Reply) -> io::Result<()> {
    match SockRef::from(io).send_with_flags(&reply.encode(), libc::MSG_NOSIGNAL)? {
        REPLY_LEN => Ok(()),
        _ => Err(io::Error::other("the answer did not fit an empty socket")),
    }
}

/// What every connection gets, dialled or accepted.
pub(super) fn tune(socket: SockRef<'_>, config: &TcpConfig) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if let Some(idle) = config.keepalive {
        let probe = TcpKeepalive::new().with_time(idle).with_interval(idle / 3).with_retries(3);
        socket.set_tcp_keepalive(&probe)?;
    }
    Ok(())
}

fn set_buffers(socket: &Socket, config: &TcpConfig) -> io::Result<()> {
    if let Some(bytes) = config.socket_buffer {
        socket.set_send_buffer_size(bytes)?;
        socket.set_recv_buffer_size(bytes)?;
    }
    Ok(())
}

/// Splits `host:port`, `[v6]:port` or `host:first-last`.
pub(super) fn split_address(address: &str) -> Result<(&str, u16, u16), TransportError> {
    let bad =
        |why: &str| TransportError::Address { address: address.to_owned(), why: why.to_owned() };
    let (host, ports) = address.rsplit_once(':').ok_or_else(|| bad("there is no port"))?;
    let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    if host.is_empty() {
        return Err(bad("there is no host"));
    }
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let port = |text: &str| text.parse().map_err(|_| bad("the port is not a number below 65,536"));
    let (first, last) = (port(first)?, port(last)?);
    if first > last {
        return Err(bad("the port range is backwards"));
    }
    Ok((host, first, last))
}

/// Listens on the first port of the range that is free.
pub(super) fn listen(
    address: &str,
    config: &TcpConfig,
) -> Result<mio::net::TcpListener, TransportError> {
    let (host, first, last) = split_address(address)?;
    let mut failure = "the name has no address".to_owned();
    for port in first..=last {
        let found = (host, port).to_socket_addrs().map_err(|error| TransportError::Address {
            address: address.to_owned(),
            why: error.to_string(),
        })?;
        for candidate in found {
            match bind(candidate, config) {
                Ok(listener) => return Ok(listener),
                Err(error) => failure = format!("{candidate}: {error}"),
            }
        }
    }
    Err(TransportError::System { what: "listening", why: failure })
}

fn bind(address: SocketAddr, config: &TcpConfig) -> io::Result<mio::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    // Accepted connections inherit them.
    set_buffers(&socket, config)?;
    socket.bind(&address.into())?;
    socket.listen(1024)?;
    Ok(mio::net::TcpListener::from_std(socket.into()))
}

/// The address that peers are told, from what is bound and what is advertised.
pub(super) fn advertised(bound: SocketAddr, advertise: Option<&str>) -> String {
    let Some(address) = advertise else { return bound.to_string() };
    match split_address(address) {
        Ok((_, 0, _)) => {
            let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
            format!("{host}:{}", bound.port())
        }
        Ok(_) => address.to_owned(),
        Err(_) => format!("{address}:{}", bound.port()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_split_and_joined() {
        assert_eq!(split_address("node:7000").unwrap(), ("node", 7000, 7000));
        assert_eq!(split_address("[::1]:7000-7009").unwrap(), ("::1", 7000, 7009));
        for bad in ["node", "node:", ":7000", "node:70000", "node:9-7", "node:7000-"] {
            assert!(matches!(split_address(bad), Err(TransportError::Address { .. })), "{bad}");
        }
        let bound: SocketAddr = "0.0.0.0:7000".parse().unwrap();
        assert_eq!(advertised(bound, None), "0.0.0.0:7000");
        assert_eq!(advertised(bound, Some("node")), "node:7000");
        assert_eq!(advertised(bound, Some("[::1]:0")), "[::1]:7000");
        assert_eq!(advertised(bound, Some("node:9")), "node:9");
    }
}
