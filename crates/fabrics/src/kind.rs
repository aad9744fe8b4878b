//! The kind of volumes that a URL names by `nvme+tcp://`.

use crate::identity::HostIdentity;
use crate::options::{FabricsOptions, Policy};
use crate::subsystem::{self, Subsystem};
use crate::volume::FabricsVolume;
use remote::{HostPort, ReachWatch};
use std::sync::Arc;
use volume::{
    OpenError, OpenOptions, READ_ONLY, Scheme, UrlOption, VolumeKind, VolumeUrl, Whole,
    parse_count, parse_duration,
};

/// Namespaces of remote subsystems.
pub const NVME_TCP: Scheme = Scheme {
    name: "nvme+tcp",
    form: "HOST:PORT[,HOST:PORT...]/SUBNQN/NSID",
    example: "nvme+tcp://10.0.0.2:4420/nqn.2014-08.org.example:disk/1",
    help: "a namespace of a remote NVMe subsystem, by TCP; several portals are several paths",
    options: &[
        READ_ONLY,
        QUEUES,
        DEPTH,
        HDGST,
        DDGST,
        POLICY,
        KATO,
        TIMEOUT,
        RECONNECT_DELAY,
        HOSTNQN,
    ],
};

const QUEUES: UrlOption =
    UrlOption::new("queues", "N", "I/O queues of each worker on each path (1)");
const DEPTH: UrlOption = UrlOption::new(
    "depth",
    "N",
    "commands in flight on a queue, as far as the controller allows it (128)",
);
const HDGST: UrlOption = UrlOption::new("hdgst", "on|off", "headers have digests (off)");
const DDGST: UrlOption = UrlOption::new(
    "ddgst",
    "on|off",
    "data has digests, and is copied for it (off)",
);
const POLICY: UrlOption = UrlOption::new(
    "policy",
    "round-robin|queue-depth",
    "which of the best paths a command takes (round-robin)",
);
const KATO: UrlOption = UrlOption::new(
    "kato",
    "DURATION",
    "keep-alive time-out: a controller that is silent for half of it is lost (5s)",
);
const TIMEOUT: UrlOption = UrlOption::new(
    "timeout",
    "DURATION",
    "connect again when a command is not answered for so long (30s)",
);
const RECONNECT_DELAY: UrlOption = UrlOption::new(
    "reconnect-delay",
    "DURATION",
    "requests wait for so long while there is no path, then fail until there is one (300s)",
);
const HOSTNQN: UrlOption = UrlOption::new(
    "hostnqn",
    "NQN",
    "this host's name (that of /etc/nvme/hostnqn, or one made of the machine's ID)",
);

/// The kind; `opened` is told of each volume that is opened.
pub fn kind<X: 'static>(opened: impl Fn(ReachWatch) + Send + Sync + 'static) -> VolumeKind<X> {
    VolumeKind::new(NVME_TCP, move |url: &mut VolumeUrl<'_>, options| {
        let volume = open(url, options)?;
        opened(volume.watch());
        Ok(Whole::new(Arc::new(volume)))
    })
}

/// The portals in a volume's URL, if it is of this kind, or in the beginning of one that names no
/// subsystem: for a process that has to know to whom it will connect.
pub fn portals(url: &str) -> Option<Vec<HostPort>> {
    let (scheme, rest) = url.split_once("://")?;
    let name = rest.split(['/', '?']).next()?;
    (scheme == NVME_TCP.name).then(|| subsystem::portals(name).ok())?
}

fn open(url: &mut VolumeUrl<'_>, open: OpenOptions) -> Result<FabricsVolume, OpenError> {
    let subsystem = Subsystem::parse(url.name).map_err(|why| OpenError::Other(why.into()))?;
    let mut options = FabricsOptions::new();
    let taken = &mut url.options;
    let count = |most: u16, why: &'static str| {
        move |text: &str| match parse_count(text)?.try_into() {
            Ok(count) if (1..=most).contains(&count) => Ok(count),
            _ => Err(why),
        }
    };
    let time = |least: u64, why: &'static str| {
        move |text: &str| match parse_duration(text)? {
            time if time.as_millis() < u128::from(least) => Err(why),
            time => Ok(time),
        }
    };
    let policy = |text: &str| match text {
        "round-robin" => Ok(Policy::RoundRobin),
        "queue-depth" => Ok(Policy::QueueDepth),
        _ => Err("it is round-robin or queue-depth"),
    };
    let queues = count(FabricsOptions::MOST_QUEUES, "it is a number from 1 to 16");
    let depth = count(FabricsOptions::MOST_DEPTH, "it is a number from 1 to 1024");
    if let Some(queues) = taken.take("queues", queues)? {
        options.queues = queues;
    }
    if let Some(depth) = taken.take("depth", depth)? {
        options.depth = depth;
    }
    options.header_digest = taken.switch("hdgst")?.unwrap_or(false);
    options.data_digest = taken.switch("ddgst")?.unwrap_or(false);
    options.policy = taken.take("policy", policy)?.unwrap_or_default();
    if let Some(kato) = taken.take("kato", time(1000, "it is at least 1s"))? {
        options.kato = kato;
    }
    if let Some(timeout) = taken.take("timeout", time(100, "it is at least 100ms"))? {
        options.timeout = timeout;
    }
    if let Some(delay) = taken.take("reconnect-delay", time(1000, "it is at least 1s"))? {
        options.reconnect_delay = delay;
    }
    if let Some(identity) = taken.take("hostnqn", HostIdentity::named)? {
        options.identity = identity;
    }
    options.read_only = taken.read_only(&open)?;
    options.block_size = open.block_size;
    FabricsVolume::open(subsystem, options).map_err(OpenError::Other)
}
