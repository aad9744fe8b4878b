//! URL scheme `nvme+tcp`, and the kind of volumes that it names.

use crate::identity::{self, HostIdentity};
use crate::options::{FabricsOptions, Policy};
use crate::subsystem::{self, Subsystem};
use crate::volume::FabricsVolume;
use dhchap::{Secret, Secrets};
use remote::{Address, ConnectionKeeper, ReachWatch, RemoteKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use volume::{
    OpenError, OpenOptions, READ_ONLY, Scheme, UrlOption, Volume, VolumeUrl, parse_count,
    parse_duration,
};

/// URL scheme of namespaces of remote NVMe/TCP subsystems.
pub const NVME_TCP: Scheme = Scheme {
    name: "nvme+tcp",
    form: "HOST:PORT[,HOST:PORT...]/SUBNQN/NSID",
    example: "nvme+tcp://10.0.0.2:4420/nqn.2014-08.org.example:disk/1",
    help: "namespace of a remote NVMe subsystem over TCP; several portals are several paths",
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
        DHCHAP_SECRET,
        DHCHAP_CTRL_SECRET,
    ],
};

const QUEUES: UrlOption = UrlOption::new(
    "queues",
    "N",
    "I/O queues of each worker on each path [default: 1]",
);
const DEPTH: UrlOption = UrlOption::new(
    "depth",
    "N",
    "outstanding commands on a queue, as far as the controller allows [default: 128]",
);
const HDGST: UrlOption = UrlOption::new("hdgst", "on|off", "header digests [default: off]");
const DDGST: UrlOption = UrlOption::new(
    "ddgst",
    "on|off",
    "data digests, which need a copy of the data [default: off]",
);
const POLICY: UrlOption = UrlOption::new(
    "policy",
    "round-robin|queue-depth",
    "choice among the best paths [default: round-robin]",
);
const KATO: UrlOption = UrlOption::new(
    "kato",
    "DURATION",
    "keep-alive timeout; a controller without an answer for half of it is lost [default: 5s]",
);
const TIMEOUT: UrlOption = UrlOption::new(
    "timeout",
    "DURATION",
    "time limit of a command, after which to reconnect [default: 30s]",
);
const RECONNECT_DELAY: UrlOption = UrlOption::new(
    "reconnect-delay",
    "DURATION",
    "time that requests wait without a path; after it, they fail until there is a path [default: \
     300s]",
);
const HOSTNQN: UrlOption = UrlOption::new(
    "hostnqn",
    "NQN",
    "host NQN [default: that of /etc/nvme/hostnqn, or one derived from the machine ID]",
);

const DHCHAP_SECRET: UrlOption = UrlOption::new(
    "dhchap-secret-file",
    "PATH",
    "file of the host's secret (DHHC-1:...), for targets that authenticate hosts",
);
const DHCHAP_CTRL_SECRET: UrlOption = UrlOption::new(
    "dhchap-ctrl-secret-file",
    "PATH",
    "file of the subsystem's secret, to authenticate the target as well",
);

/// NVMe over TCP.
#[derive(Debug)]
pub struct NvmeTcp;

impl RemoteKind for NvmeTcp {
    fn schemes(&self) -> &'static [Scheme] {
        &[NVME_TCP]
    }

    fn open(
        &self,
        url: &mut VolumeUrl<'_>,
        options: OpenOptions,
        _: Option<Arc<dyn ConnectionKeeper>>,
    ) -> Result<(Arc<dyn Volume>, ReachWatch), OpenError> {
        let volume = open(url, options)?;
        let watch = volume.watch();
        Ok((Arc::new(volume), watch))
    }

    fn servers(&self, url: &str) -> Option<Vec<Address>> {
        let (_, rest) = url.split_once("://")?;
        let name = rest.split(['/', '?']).next()?;
        let portals = subsystem::portals(name).ok()?;
        Some(portals.into_iter().map(Address::from).collect())
    }

    /// A target executes commands of a connection that has ended without telling when it is done.
    fn is_fenced(&self) -> bool {
        false
    }

    /// Reads the files with this host's identity.
    fn prepare(&self) {
        identity::local();
    }
}

fn path(text: &str) -> Result<PathBuf, &'static str> {
    match Path::new(text) {
        path if path.is_absolute() => Ok(path.into()),
        _ => Err("it is a whole path"),
    }
}

/// Reads the DH-HMAC-CHAP secrets of this host and of the controller from files.
fn secrets(
    host: Option<PathBuf>,
    controller: Option<PathBuf>,
) -> Result<Option<Secrets>, OpenError> {
    let other = |why: String| OpenError::Other(why.into());
    let Some(host) = host else {
        return match controller {
            None => Ok(None),
            Some(_) => Err(other(
                "dhchap-ctrl-secret-file needs dhchap-secret-file as well".into(),
            )),
        };
    };
    let read = |path: PathBuf| {
        secret_file(&path).map_err(|why| other(format!("{}: {why}", path.display())))
    };
    Ok(Some(Secrets {
        host: read(host)?,
        controller: controller.map(read).transpose()?,
    }))
}

fn secret_file(path: &Path) -> Result<Secret, String> {
    let text = dhchap::read_private(path).map_err(|error| error.to_string())?;
    Secret::parse(&text).map_err(|error| error.to_string())
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
    let queues = count(FabricsOptions::MAX_QUEUES, "it is a number from 1 to 16");
    let depth = count(FabricsOptions::MAX_DEPTH, "it is a number from 1 to 1024");
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
    let host = taken.take("dhchap-secret-file", path)?;
    let controller = taken.take("dhchap-ctrl-secret-file", path)?;
    options.secrets = secrets(host, controller)?;
    options.read_only = taken.read_only(&open)?;
    options.block_size = open.block_size;
    FabricsVolume::open(subsystem, options).map_err(OpenError::Other)
}
