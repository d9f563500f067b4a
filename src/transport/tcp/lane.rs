//! Lanes: prepared, joined to the peer's half, up, down, fenced.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::dial::Dial;
use super::lane_reader::{LaneReader, Note, ReadEnd};
use super::lane_writer::{Done, Drive, Job, LaneWriter};
use super::preamble::{LaneParams, Preamble, Reply, Secret};
use super::shared::{Counters, LaneKey, Shared};
use super::socket::{self, Stream};
use super::worker::{Owner, Timer, Worker};
use crate::protocol::TransferId;
use crate::transport::{CompletionStatus, Event, LaneRole};

/// Bytes moved for one lane before others are served.
const TURN_BYTES: usize = 2 * 1024 * 1024;

/// One end of a lane.
pub(super) struct Lane {
    /// What the peer must show, or has shown.
    secret: Secret,
    /// This side dialled the link, so it dials its lanes.
    dials: bool,
    phase: Phase,
}

enum Phase {
    /// Not started here. The peer's connection may be here already.
    Prepared {
        early: Option<mio::net::TcpStream>,
    },
    /// Started; the peer's connection is to come. `answer` is the peer's secret.
    Awaiting {
        answer: Secret,
        deadline: Instant,
    },
    /// Started and being dialled; the answer must be `answer`.
    Dialling {
        dial: Box<Dial>,
        deadline: Instant,
    },
    Up {
        stream: Stream,
        end: End,
    },
}

enum End {
    Reader(Box<LaneReader>),
    Writer(Box<LaneWriter>),
}

impl Lane {
    pub(super) fn stream(&mut self) -> Option<&mut Stream> {
        match &mut self.phase {
            Phase::Prepared { .. } | Phase::Awaiting { .. } => None,
            Phase::Dialling { dial, .. } => Some(&mut dial.stream),
            Phase::Up { stream, .. } => Some(stream),
        }
    }
}

/// Reports what became of a job.
fn report_done(shared: &Shared, key: &LaneKey, done: Done) {
    let Done { transfer, ticket, status } = done;
    (shared.sink)(Event::WriteDone { lane: key.lane, transfer, ticket, status });
}

/// Reports what a reader met.
fn report_note(shared: &Shared, key: &LaneKey, note: Note) {
    let LaneKey { link, lane, .. } = *key;
    (shared.sink)(match note {
        Note::Marker { transfer, round } => Event::MarkerSeen { link, lane, transfer, round },
        Note::Refused { transfer, why } => Event::WriteRefused { link, lane, transfer, why },
        Note::Closed { transfer } => shared.landing_closed(transfer),
    });
}

impl Worker {
    pub(super) fn prepare_lane(&mut self, key: LaneKey, secret: Secret, dials: bool) {
        if self.lanes.contains_key(&key) {
            // An epoch is never used twice: neither of the two can be trusted.
            return self.lane_down(&key, "it was prepared twice");
        }
        self.lanes.insert(key, Lane { secret, dials, phase: Phase::Prepared { early: None } });
    }

    pub(super) fn start_lane(
        &mut self,
        key: LaneKey,
        peer: LaneParams,
        dial: Option<SocketAddr>,
        deadline: Instant,
    ) {
        let answer = peer.secret;
        let phase = self.lanes.get_mut(&key).map(|lane| &mut lane.phase);
        let Some(Phase::Prepared { early }) = phase else {
            return self.lane_down_anyhow(&key, "it is not prepared");
        };
        if self.crippled {
            return self.lane_down(&key, "the I/O thread died");
        }
        if let Some(io) = early.take() {
            return self.join_accepted(&key, io, &answer);
        }
        let phase = match dial {
            None => Ok(Phase::Awaiting { answer, deadline }),
            Some(address) => self
                .dial_lane(&key, &peer, address)
                .map(|dial| Phase::Dialling { dial: Box::new(dial), deadline }),
        };
        match (phase, self.lanes.get_mut(&key)) {
            (Ok(phase), Some(lane)) => {
                lane.phase = phase;
                self.set_timer(deadline, Timer::Lane(key));
            }
            (Err(error), _) => self.lane_down(&key, &format!("dialling: {error}")),
            (Ok(_), None) => {}
        }
    }

    fn dial_lane(
        &mut self,
        key: &LaneKey,
        peer: &LaneParams,
        address: SocketAddr,
    ) -> std::io::Result<Dial> {
        let LaneParams { link, lane, secret, .. } = *peer;
        let preamble = Preamble::Lane { link, lane, dialler: key.role, secret };
        let token = self.new_token(Owner::Lane(*key));
        let (config, registry) = (&self.shared.config, self.poll.registry());
        let dial = Dial::start(address, &preamble, config, registry, token);
        if dial.is_err() {
            self.owners.remove(&token);
        }
        dial
    }

    /// Takes an accepted connection that claims to be the lane's, if it shows the secret and the
    /// lane waits for one. What is refused is closed by being dropped.
    pub(super) fn attach(&mut self, key: &LaneKey, secret: &Secret, io: mio::net::TcpStream) {
        let lane = self.lanes.get_mut(key).filter(|lane| !lane.dials);
        match lane.filter(|lane| lane.secret.matches(secret)).map(|lane| &mut lane.phase) {
            Some(Phase::Prepared { early: early @ None }) => *early = Some(io),
            Some(&mut Phase::Awaiting { answer, .. }) => self.join_accepted(key, io, &answer),
            _ => {
                tracing::debug!("refusing a connection for {}", key.lane);
                Counters::bump(&self.shared.counters.lanes_refused);
                // Only so that the other side can say why.
                let _ = socket::send_reply(&io, Reply::Refused);
            }
        }
    }

    fn join_accepted(&mut self, key: &LaneKey, io: mio::net::TcpStream, answer: &Secret) {
        let sent = socket::send_reply(&io, Reply::Welcome(*answer));
        match sent.and_then(|()| self.watch(io, Owner::Lane(*key))) {
            Ok(stream) => self.lane_up(key, stream),
            Err(error) => self.lane_down(key, &format!("answering: {error}")),
        }
    }

    fn lane_up(&mut self, key: &LaneKey, stream: Stream) {
        let token = stream.token;
        let end = match key.role {
            LaneRole::Reader => End::Reader(Box::new(LaneReader::new(key.lane))),
            LaneRole::Writer => {
                End::Writer(Box::new(LaneWriter::new(self.shared.config.frame_bytes)))
            }
        };
        let Some(lane) = self.lanes.get_mut(key) else { return };
        lane.phase = Phase::Up { stream, end };
        let LaneKey { link, lane, role } = *key;
        self.emit(Event::LaneUp { link, lane, role });
        self.make_ready(token);
    }

    pub(super) fn expire_lane(&mut self, key: &LaneKey, now: Instant) {
        match self.lanes.get(key).map(|lane| &lane.phase) {
            Some(Phase::Awaiting { deadline, .. } | Phase::Dialling { deadline, .. })
                if *deadline <= now =>
            {
                self.lane_down(key, "the peer's half did not come in time");
            }
            _ => {}
        }
    }

    /// Moves a lane on for one turn; `true` if it could go on at once.
    pub(super) fn serve_lane(&mut self, key: &LaneKey) -> bool {
        let shared = Arc::clone(&self.shared);
        let Some(lane) = self.lanes.get_mut(key) else { return false };
        let result = match &mut lane.phase {
            Phase::Prepared { .. } | Phase::Awaiting { .. } => Ok(false),
            Phase::Dialling { .. } => {
                self.serve_lane_dial(key);
                Ok(false)
            }
            Phase::Up { stream, end: End::Reader(reader) } => {
                serve_reader(&shared, key, stream, reader)
            }
            Phase::Up { stream, end: End::Writer(writer) } => {
                serve_writer(&shared, key, stream, writer)
            }
        };
        result.unwrap_or_else(|why| {
            self.lane_down(key, &why);
            false
        })
    }

    fn serve_lane_dial(&mut self, key: &LaneKey) {
        let Some(lane) = self.lanes.get_mut(key) else { return };
        let Phase::Dialling { dial, .. } = &mut lane.phase else { return };
        let why = match dial.drive() {
            Ok(None) => return,
            Ok(Some(Reply::Welcome(secret))) if secret.matches(&lane.secret) => {
                let taken = std::mem::replace(&mut lane.phase, Phase::Prepared { early: None });
                if let Phase::Dialling { dial, .. } = taken {
                    self.lane_up(key, dial.stream);
                }
                return;
            }
            Ok(Some(Reply::Welcome(_))) => "whoever answered doesn't know the secret".to_owned(),
            Ok(Some(Reply::Full | Reply::Refused)) => "the peer refused it".to_owned(),
            Err(why) => why,
        };
        self.lane_down(key, &format!("dialling: {why}"));
    }

    /// Takes a lane out, closes its socket, and answers for everything that it owed.
    fn remove_lane(&mut self, key: &LaneKey) -> bool {
        let Some(lane) = self.lanes.remove(key) else { return false };
        let (stream, end) = match lane.phase {
            Phase::Prepared { .. } | Phase::Awaiting { .. } => return true,
            Phase::Dialling { dial, .. } => (dial.stream, None),
            Phase::Up { stream, end } => (stream, Some(end)),
        };
        self.owners.remove(&stream.token);
        stream.abort_on_close();
        // Closed before anything is reported: what is said of the lane is true when it is said.
        drop(stream);
        match end {
            Some(End::Reader(mut reader)) => {
                if let Some(transfer) = reader.abandon(&self.shared.landings) {
                    self.emit(self.shared.landing_closed(transfer));
                }
            }
            Some(End::Writer(mut writer)) => {
                writer.flush().into_iter().for_each(|done| report_done(&self.shared, key, done));
            }
            None => {}
        }
        true
    }

    /// Ends a lane and reports it, if there is one.
    pub(super) fn lane_down(&mut self, key: &LaneKey, why: &str) {
        if self.remove_lane(key) {
            let LaneKey { link, lane, role } = *key;
            self.emit(Event::LaneDown { link, lane, role, why: why.to_owned() });
        }
    }

    /// Ends a lane and reports it, even if there is none.
    fn lane_down_anyhow(&mut self, key: &LaneKey, why: &str) {
        self.remove_lane(key);
        let LaneKey { link, lane, role } = *key;
        self.emit(Event::LaneDown { link, lane, role, why: why.to_owned() });
    }

    /// Takes the reader's end out of service. The thread that owns it is here, so it is in no
    /// receive call, and with the lane go its secret and its socket.
    pub(super) fn fence(&mut self, key: &LaneKey) {
        self.remove_lane(key);
        self.emit(Event::LaneFenced { link: key.link, lane: key.lane });
    }

    pub(super) fn kill(&mut self, key: &LaneKey) {
        self.lane_down(key, "closed by this side");
    }

    pub(super) fn post(&mut self, key: &LaneKey, job: Job) {
        let lane = self.lanes.get_mut(key).map(|lane| &mut lane.phase);
        let Some(Phase::Up { stream, end: End::Writer(writer) }) = lane else {
            let done = job.done(CompletionStatus::Flushed);
            drop(job);
            return report_done(&self.shared, key, done);
        };
        let (token, writable) = (stream.token, stream.writable);
        match writer.post(job) {
            Some(done) => report_done(&self.shared, key, done),
            None if writable => self.make_ready(token),
            None => {}
        }
    }

    pub(super) fn cancel(&mut self, transfer: TransferId) {
        for (key, lane) in &mut self.lanes {
            if let Phase::Up { end: End::Writer(writer), .. } = &mut lane.phase {
                let cancelled = writer.cancel(transfer);
                cancelled.into_iter().for_each(|done| report_done(&self.shared, key, done));
            }
        }
    }
}

fn serve_reader(
    shared: &Shared,
    key: &LaneKey,
    stream: &mut Stream,
    reader: &mut LaneReader,
) -> Result<bool, String> {
    if !stream.readable {
        return Ok(false);
    }
    let report = |note| report_note(shared, key, note);
    reader.drive(stream, &shared.landings, TURN_BYTES, report).map_err(|end| {
        match end {
            ReadEnd::Frame(_) => Counters::bump(&shared.counters.frames_malformed),
            ReadEnd::Refused { .. } => Counters::bump(&shared.counters.writes_refused),
            ReadEnd::Io(_) | ReadEnd::Eof => {}
        }
        end.to_string()
    })
}

fn serve_writer(
    shared: &Shared,
    key: &LaneKey,
    stream: &mut Stream,
    writer: &mut LaneWriter,
) -> Result<bool, String> {
    // The reader never speaks: a byte is a violation, and its end is the lane's.
    if stream.readable {
        match stream.read(&mut [0]).map_err(|error| error.to_string())? {
            None => {}
            Some(0) => return Err("the peer closed the connection".to_owned()),
            Some(_) => return Err("the peer spoke out of turn".to_owned()),
        }
    }
    if !stream.writable {
        return Ok(false);
    }
    let report = |done| report_done(shared, key, done);
    let drive = writer.drive(stream, TURN_BYTES, report).map_err(|error| error.to_string())?;
    Ok(drive == Drive::Again)
}
