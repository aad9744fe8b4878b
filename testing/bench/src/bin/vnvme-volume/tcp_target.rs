//! This project's NVMe/TCP target of a null volume, whose association is on the client's thread. A
//! thread of its own accepts connections.

use anyhow::{Context, Result};
use controller::{ControllerConfig, NamespaceConfig};
use fabrics_target::{
    Association, NewAssociation, Target, TargetConfig, TargetLimits, TargetListener,
};
use std::net::{Ipv4Addr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use volume::{Io, IoOptions, OpenOptions, open_url};
use worker::{ConnectRate, Frontend, Handle, Options, Worker};

const NQN: &str = "nqn.2014-08.org.vnvme:cost";
/// Options of the client. No keep-alive is due while requests are counted.
const OPTIONS: &str = "kato=600s&hostnqn=nqn.2014-08.org.vnvme:cost-host";

/// Upper bound of the epoll tokens of the listener's own descriptors.
const LISTENER_TOKENS: u32 = 64;

pub struct TcpTarget {
    pub worker: Worker<Association>,
    accepted: Receiver<NewAssociation>,
}

impl TcpTarget {
    /// Starts the target. Returns its namespace's URL, and the target.
    pub fn start(size: u64) -> Result<(String, Self)> {
        let volume = open_url(&format!("null://{size}"), OpenOptions::default())?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let target = Target::new(TargetConfig {
            nqn: NQN.into(),
            controller: ControllerConfig::default(),
            namespaces: vec![NamespaceConfig {
                nsid: 1,
                block_size: volume.info().block_size.max(512),
                volume,
                read_only: false,
                nguid: [1; 16],
                zones: None,
                placement: None,
                metadata: None,
                formats: None,
                eui64: [1; 8],
                uuid: [0; 16],
            }],
            address,
            limits: TargetLimits::default(),
            hosts: Vec::new(),
            keys: Vec::new(),
        });
        let handle = Handle::new()?;
        let io = Rc::new(Io::new(IoOptions::default()));
        let worker = Worker::new(io, &handle, Options::default())?;
        let (sender, accepted) = channel();
        std::thread::spawn(move || {
            if let Err(error) = accept(target, listener, sender) {
                eprintln!("{error:#}");
            }
        });
        let url = format!("nvme+tcp://{address}/{NQN}/1?{OPTIONS}");
        Ok((url, Self { worker, accepted }))
    }

    /// Takes new associations and connections, and answers requests.
    pub fn attend(&mut self) -> Result<()> {
        for new in self.accepted.try_iter() {
            self.worker.add(|context| new.make(context))?;
        }
        self.worker.step();
        Ok(())
    }
}

/// Accepts connections, and passes associations on. Valgrind has no system call that waits for
/// sockets as a worker does, so they are tried at intervals.
fn accept(
    target: Arc<Target>,
    listener: TcpListener,
    associations: Sender<NewAssociation>,
) -> Result<()> {
    let handle = Handle::new()?;
    let io = Rc::new(Io::new(IoOptions::default()));
    let mut worker = Worker::new(io, &handle, Options::default())?;
    let launch = Box::new(move |new| drop(associations.send(new)));
    let owner = worker.add(|context| {
        let rate = ConnectRate::UNLIMITED;
        TargetListener::new(target, listener.into(), rate, None, launch, context)
    })?;
    let owner = owner.context("no front-end")?;
    while let Some(front) = worker.front_mut(owner) {
        (0..=LISTENER_TOKENS).for_each(|token| front.ready(token));
        worker.step();
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
