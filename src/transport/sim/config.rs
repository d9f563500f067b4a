//! What a simulated network is like before anybody injects a fault.

use std::time::Duration;

use super::fault::Fault;
use super::filter::Filter;

/// The settings of a [`super::SimNet`].
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Seeds every draw. The same seed and the same calls give the same events.
    pub seed: u64,
    /// The least time that anything takes from one end to the other.
    pub min_delay: Duration,
    /// The most, faults apart.
    pub max_delay: Duration,
    /// `true`: the reader checks every write against its landings before a byte lands, as `tcp`
    /// does. `false`: it isn't asked, as on RDMA: bytes land wherever the placement that the reader
    /// once opened for that transfer says, closed or not, until the lane is fenced.
    pub confined: bool,
    /// How likely a write that had left before its lane or link went down still lands.
    pub late_landing: f64,
    /// When a writer gives up on an endpoint that has crashed.
    pub retry_timeout: Duration,
    /// Control bytes that may be on the way in one direction of a link; past it, sends are refused
    /// as [`super::super::TransportError::Congested`].
    pub control_queue_limit: usize,
    /// Faults injected from the start, usually with a [`Filter::chance`] below 1.
    pub faults: Vec<(Fault, Filter)>,
    /// Lines that [`super::SimNet::trace`] keeps; 0 for none.
    pub trace_len: usize,
}

impl Default for SimConfig {
    fn default() -> SimConfig {
        SimConfig {
            seed: 0,
            min_delay: Duration::from_micros(1),
            max_delay: Duration::from_micros(50),
            confined: true,
            late_landing: 0.5,
            retry_timeout: Duration::from_millis(500),
            control_queue_limit: 4 << 20,
            faults: Vec::new(),
            trace_len: 0,
        }
    }
}

impl SimConfig {
    /// The default with this seed: random delays, no faults.
    pub fn seeded(seed: u64) -> SimConfig {
        SimConfig { seed, ..SimConfig::default() }
    }

    /// A bad network that keeps every promise of [`super::super::Transport`]: control frames are
    /// lost, doubled and overtaken, lanes run apart, completions come before the bytes.
    pub fn rough(seed: u64) -> SimConfig {
        let slow = Duration::from_millis(1);
        let sometimes = |p| Filter::any().chance(p);
        let faults = vec![
            (Fault::DropControl, sometimes(0.02)),
            (Fault::DuplicateControl, sometimes(0.05)),
            (Fault::DelayControl(slow), sometimes(0.05)),
            (Fault::DelayWrite(slow), sometimes(0.1)),
            (Fault::AckEarly, sometimes(0.2)),
        ];
        SimConfig { faults, ..SimConfig::seeded(seed) }
    }
}
