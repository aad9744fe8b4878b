//! NVMe subsystem that is exported by TCP: its namespaces, hosts and associations.

use crate::authentication::{AuthResult, AuthState, HostKey, Prover};
use crate::handshake::Connected;
use crate::members::Members;
use crate::stats::TargetStats;
use controller::{AnaGroup, ControllerConfig, NamespaceConfig};
use dhchap::Names;
use nvme::Status;
use nvme::identify::{Ascii, Nqn};
use nvme::log::AnaState;
use nvme::log::discovery::{
    AddressFamily, CNTLID_DYNAMIC, DiscoveryHeader, DiscoveryRecord, SubsystemType,
    TREQ_NO_SQ_FLOW_CONTROL, TransportType,
};
use probes::LogLimit;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use sync::Unpoisoned;
use volume::Inbox;
use zerocopy::IntoBytes;

/// Limits of a subsystem on hosts and their associations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetLimits {
    /// Number of I/O queues that an association may have, 1 to 64.
    pub queues: u16,
    /// Maximum number of entries of an I/O queue, 2 to 256.
    pub entries: u16,
    /// Maximum number of bytes of in-capsule data: a multiple of 16, up to 64 KiB.
    pub in_capsule: u32,
    /// Number of bytes of memory for the data of one association's commands.
    pub memory: u32,
    /// Memory in bytes for the data of all associations of one host. Further associations get a
    /// quarter of the rest, at least [`TargetLimits::least_memory`].
    pub host_memory: u64,
    /// Maximum number of associations at a time, without those of unauthenticated hosts.
    pub associations: usize,
    /// Maximum number of associations of one host at a time.
    pub host_associations: usize,
    /// Maximum number of concurrent associations that have not authenticated. Above it the oldest
    /// one is closed.
    pub authenticating: usize,
    /// Maximum number of connections that have not sent Connect. Above it the oldest one is closed.
    pub newcomers: usize,
    /// Time limit of a new connection for sending its Connect command.
    pub handshake: Duration,
}

impl Default for TargetLimits {
    fn default() -> Self {
        Self {
            queues: 16,
            entries: 128,
            in_capsule: 8192,
            memory: 32 << 20,
            host_memory: 256 << 20,
            associations: 64,
            host_associations: 16,
            authenticating: 16,
            newcomers: 64,
            handshake: Duration::from_secs(10),
        }
    }
}

impl TargetLimits {
    /// Returns the memory, in bytes, of an association of a host that has used up its budget.
    pub fn least_memory(&self) -> u32 {
        self.memory.min(4 << 20)
    }
}

/// Configuration of an NVMe/TCP subsystem for other hosts.
#[derive(Debug, Clone)]
pub struct TargetConfig {
    /// NQN of the subsystem.
    pub nqn: String,
    /// Configuration that all controllers of the subsystem have in common.
    pub controller: ControllerConfig,
    /// Namespaces of the subsystem, which each controller has.
    pub namespaces: Vec<NamespaceConfig>,
    /// Network address of the subsystem that discovery log pages contain.
    pub address: SocketAddr,
    /// Limits on hosts and their associations.
    pub limits: TargetLimits,
    /// NQNs of the hosts that may connect; if empty, all hosts may.
    pub hosts: Vec<String>,
    /// Keys of hosts that must authenticate. If there is any, only hosts with a key may connect;
    /// otherwise no host must authenticate.
    pub keys: Vec<HostKey>,
}

/// Message to an association, from the front-end that accepts connections or from another thread.
#[derive(Debug)]
pub(crate) enum AssociationMessage {
    /// The host has made a new connection for an I/O queue.
    Connected(Box<Connected>),
    /// A slow authentication step for this queue is complete.
    Proven {
        qid: u16,
        place: u16,
        outcome: Box<AuthResult>,
    },
    /// The ANA state of the subsystem's namespaces has changed.
    State,
    /// The size of a volume has changed.
    Sizes,
    /// The association must end to make room for another unauthenticated one.
    Displaced,
    /// The subsystem ends, and with it the association.
    End,
}

/// Subsystem that is exported at a TCP port. All its front-ends share this state.
pub struct Target {
    pub(crate) config: TargetConfig,
    pub(crate) ana: Arc<AnaGroup>,
    members: Mutex<Members>,
    stats: TargetStats,
    pub(crate) log: Log,
    /// Thread for slow authentication steps; `None` if no host must authenticate.
    pub(crate) prover: Option<Prover>,
}

/// Rate limits of log messages, which hosts can cause as often as they like.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub connected: LogLimit,
    pub ended: LogLimit,
    pub not_proven: LogLimit,
    pub refused: LogLimit,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Target {
    /// Creates a subsystem with this configuration and without associations.
    pub fn new(config: TargetConfig) -> Arc<Self> {
        let prover = if config.keys.is_empty() {
            None
        } else {
            Prover::start()
        };
        Arc::new(Self {
            prover,
            config,
            ana: Arc::new(AnaGroup::new(AnaState::OPTIMIZED)),
            members: Mutex::default(),
            stats: TargetStats::default(),
            log: Log::default(),
        })
    }

    /// Returns the counters of the subsystem.
    pub fn stats(&self) -> &TargetStats {
        &self.stats
    }

    /// Returns the configuration of the subsystem.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// Returns the NQNs of the connected hosts, one for each association.
    pub fn hosts(&self) -> Vec<String> {
        self.members.lock().unpoisoned().hosts()
    }

    /// Sets the ANA state of the namespaces for hosts, which are notified by an event.
    pub fn set_ana_state(&self, state: AnaState) {
        if self.ana.set(state) {
            self.tell_all(|| AssociationMessage::State);
        }
    }

    /// Notifies the associations that the size of a volume has changed.
    pub fn sizes_changed(&self) {
        self.tell_all(|| AssociationMessage::Sizes);
    }

    /// Ends the associations of all hosts.
    pub fn end(&self) {
        self.tell_all(|| AssociationMessage::End);
    }

    fn tell_all(&self, message: impl Fn() -> AssociationMessage) {
        let members = self.members.lock().unpoisoned();
        members.mails().for_each(|inbox| inbox.put(message()));
    }

    /// Returns whether the host with this NQN may connect.
    pub(crate) fn admits(&self, hostnqn: &str) -> bool {
        let TargetConfig { hosts, keys, .. } = &self.config;
        let listed = hosts.is_empty() || hosts.iter().any(|host| host == hostnqn);
        listed && (keys.is_empty() || keys.iter().any(|key| key.nqn == hostnqn))
    }

    /// Returns the initial authentication state of a new queue of a host.
    ///
    /// # Errors
    /// `PermissionDenied` when the host has no key; otherwise the I/O error when the kernel
    /// provides no random numbers.
    pub(crate) fn proof(&self, hostnqn: &str, now: Instant) -> std::io::Result<AuthState> {
        let keys = &self.config.keys;
        if keys.is_empty() {
            return Ok(AuthState::Given);
        }
        let key = keys.iter().find(|key| key.nqn == hostnqn);
        // Hosts without a key were refused before.
        let key = key.ok_or(std::io::ErrorKind::PermissionDenied)?;
        let names = Names {
            host: hostnqn.into(),
            subsystem: self.config.nqn.clone(),
        };
        AuthState::wanted(names, key.secrets.clone(), self.prover.is_some(), now)
    }

    /// Counts and logs a failed authentication of a host.
    pub(crate) fn not_proven(
        &self,
        hostnqn: &str,
        peer: Option<SocketAddr>,
        why: &dhchap::Failure,
    ) {
        self.stats.refused.count();
        self.log.not_proven.line(|left_out| {
            let from = peer.map(|peer| peer.to_string()).unwrap_or_default();
            tracing::warn!(
                left_out,
                host = hostnqn,
                from,
                "authentication of a host failed: {why}"
            );
        });
    }

    /// Reserves a controller ID and memory for a new association.
    ///
    /// # Errors
    /// Connect Controller Busy when the host, its address or all hosts together have reached the
    /// maximum number of associations.
    pub(crate) fn reserve(self: &Arc<Self>, connected: &Connected) -> Result<Reservation, Status> {
        let mut members = self.members.lock().unpoisoned();
        let (cntlid, memory) = members.reserve(&self.config, connected)?;
        self.stats.associations.count();
        Ok(Reservation {
            target: self.clone(),
            cntlid,
            memory,
            used: false,
        })
    }

    /// Registers the inbox of the association with this controller ID.
    pub(crate) fn enter(&self, cntlid: u16, inbox: &Arc<Inbox<AssociationMessage>>) {
        self.members.lock().unpoisoned().enter(cntlid, inbox);
    }

    /// Moves an association from the unauthenticated to the authenticated ones.
    ///
    /// # Errors
    /// Connect Controller Busy when the authenticated associations have reached a limit.
    pub(crate) fn authenticated(&self, cntlid: u16) -> Result<(), Status> {
        let mut members = self.members.lock().unpoisoned();
        members.authenticated(&self.config, cntlid)
    }

    /// Removes the association with this controller ID.
    pub(crate) fn leave(&self, cntlid: u16) {
        self.members.lock().unpoisoned().leave(cntlid);
    }

    /// Checks whether the association named in a Connect command exists and belongs to its host.
    ///
    /// # Errors
    /// The status with which the Connect command must fail.
    pub(crate) fn owns(&self, connected: &Connected) -> Result<(), Status> {
        let mut members = self.members.lock().unpoisoned();
        members.owns(connected)
    }

    /// Passes a connection to its association.
    ///
    /// # Errors
    /// Returns the connection and the status with which its Connect command must fail: the
    /// association does not exist, belongs to another host, or has too many connections pending on
    /// a stuck worker.
    pub(crate) fn pass(&self, connected: Box<Connected>) -> Result<(), (Box<Connected>, Status)> {
        let most = self.config.limits.queues;
        self.members.lock().unpoisoned().pass(connected, most)
    }

    /// Records that a connection has arrived at the association with this controller ID.
    pub(crate) fn passed(&self, cntlid: u16) {
        self.members.lock().unpoisoned().passed(cntlid);
    }

    /// Returns the discovery log page with the address of the subsystem, for a connection to
    /// `local`. It has no entries for a host that may not connect.
    pub(crate) fn discovery_log(&self, local: Option<SocketAddr>, admitted: bool) -> Vec<u8> {
        let at = |address: SocketAddr| {
            let local = local.map_or(address.ip(), |local| local.ip());
            let ip = if address.ip().is_unspecified() {
                local
            } else {
                address.ip()
            };
            (ip.to_canonical(), address.port())
        };
        let (ip, port) = at(self.config.address);
        let record = |subtype, nqn: &str| DiscoveryRecord {
            trtype: TransportType::TCP,
            adrfam: match ip {
                IpAddr::V4(_) => AddressFamily::IPV4,
                IpAddr::V6(_) => AddressFamily::IPV6,
            },
            subtype,
            treq: nvme::log::discovery::TREQ_NOT_REQUIRED | TREQ_NO_SQ_FLOW_CONTROL,
            portid: 1.into(),
            cntlid: CNTLID_DYNAMIC.into(),
            asqsz: 32.into(),
            trsvcid: Ascii::new(&port.to_string()).unwrap_or_default(),
            subnqn: Nqn::new(nqn).unwrap_or_default(),
            traddr: Ascii::new(&ip.to_string()).unwrap_or_default(),
            ..DiscoveryRecord::default()
        };
        let records = admitted.then(|| record(SubsystemType::NVM, &self.config.nqn));
        let records = records.as_slice();
        let header = DiscoveryHeader {
            genctr: 1.into(),
            numrec: (records.len() as u64).into(),
            ..DiscoveryHeader::default()
        };
        let mut page = header.as_bytes().to_vec();
        records
            .iter()
            .for_each(|record| page.extend(record.as_bytes()));
        page
    }
}

/// Reserved place for an association, which is freed when this is dropped unused.
#[derive(Debug)]
pub(crate) struct Reservation {
    target: Arc<Target>,
    cntlid: u16,
    memory: u32,
    used: bool,
}

impl Reservation {
    /// Returns the controller ID of the reserved association.
    pub(crate) const fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Returns the number of bytes of memory for the data of the association's commands.
    pub(crate) const fn memory(&self) -> u32 {
        self.memory
    }

    /// Marks the reservation as used, so that it is not released on drop. Returns the controller
    /// ID.
    pub(crate) fn using(mut self) -> u16 {
        self.used = true;
        self.cntlid
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.used {
            self.target.leave(self.cntlid);
        }
    }
}
