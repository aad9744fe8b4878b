//! Our NVMe/TCP initiator as a target: a volume's queue on a ring of the loading thread, as in a
//! worker.

use anyhow::{Context, Result, anyhow, ensure};
use dma::{Access, DmaMap, Memory, Prot, SegmentList};
use fabrics::{FabricsOptions, FabricsVolume, HostIdentity, Subsystem};
use load::lane::{Geometry, IoResult, Lane, Target};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use volume::{Completion, Io, IoOptions, Op, OpenQueue, Volume};

/// Time limit for a path to become available.
const PATH_TIMEOUT: Duration = Duration::from_secs(10);

/// Parameters of the initiator.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Number of connections of the queue.
    pub connections: u16,
    /// Whether headers and data have digests.
    pub digests: bool,
}

/// A namespace behind an NVMe/TCP front-end at an address.
pub struct InitiatorTarget {
    pub address: SocketAddr,
    pub nqn: String,
    pub setup: Setup,
}

impl InitiatorTarget {
    /// Creates a volume with an association of its own, which ends with its lane.
    fn volume(&self, depth: u16) -> Result<FabricsVolume> {
        let name = format!("{}/{}/1", self.address, self.nqn);
        let subsystem = Subsystem::parse(&name).map_err(|why| anyhow!("{name}: {why}"))?;
        let identity = HostIdentity::named("nqn.2014-08.org.vnvme:bench");
        let options = FabricsOptions {
            queues: self.setup.connections,
            depth: depth.div_ceil(self.setup.connections).max(1),
            header_digest: self.setup.digests,
            data_digest: self.setup.digests,
            identity: identity.map_err(|why| anyhow!("this host's name: {why}"))?,
            ..FabricsOptions::new()
        };
        FabricsVolume::open(subsystem, options).map_err(|error| anyhow!("{error}"))
    }
}

impl Target for InitiatorTarget {
    type Lane = InitiatorLane;

    fn geometry(&self) -> Geometry {
        Geometry {
            size: 1 << 30,
            block_size: 512,
            description: format!("NVMe/TCP at {}", self.address),
        }
    }

    fn lane(&self, _index: u16, depth: u16, bytes: usize) -> Result<InitiatorLane> {
        let volume = self.volume(depth)?;
        let io = Io::new(IoOptions::default());
        let queue = volume.open(&io)?;
        let len = usize::from(depth) * bytes;
        let memory = Memory::anonymous(len)?;
        let mut map = DmaMap::new();
        map.map(0, len as u64, Some((memory.clone(), 0)), Prot::RW)?;
        let list = |slot: u16| {
            let (at, mut list) = (u64::from(slot) * bytes as u64, SegmentList::new());
            let taken = list.begin_piece(&map, at, bytes as u64, Access::Write);
            ensure!(taken, "no memory for I/O {slot}");
            Ok(Some(list))
        };
        let lists = (0..depth).map(list).collect::<Result<_>>()?;
        let mut lane = InitiatorLane {
            queue,
            io,
            lists,
            refused: Vec::new(),
            memory,
            bytes,
            _map: map,
            _volume: volume,
        };
        lane.connect(depth)?;
        Ok(lane)
    }
}

/// A queue of the volume, as a lane. The fields are dropped in order.
pub struct InitiatorLane {
    queue: OpenQueue,
    io: Io,
    /// Memory of idle slots.
    lists: Vec<Option<SegmentList>>,
    /// Completions of requests that ended immediately.
    refused: Vec<Completion>,
    memory: Memory,
    bytes: usize,
    _map: DmaMap,
    _volume: FabricsVolume,
}

impl InitiatorLane {
    /// Waits until the I/O queues are connected, by sending as many reads as there are slots.
    fn connect(&mut self, depth: u16) -> Result<()> {
        for slot in 0..depth {
            self.submit(slot, false, 0)?;
        }
        self.kick()?;
        let (began, mut ended, mut failed) = (Instant::now(), 0, None);
        while ended < usize::from(depth) {
            ended += self.poll(&mut |_, outcome| failed = outcome.err())?;
            ensure!(
                began.elapsed() < PATH_TIMEOUT,
                "the front-end does not answer"
            );
        }
        failed.map_or(Ok(()), |why| Err(anyhow!(why)))
    }
}

fn end(
    lists: &mut [Option<SegmentList>],
    done: &mut impl FnMut(u16, IoResult),
    completion: Completion,
) {
    let slot = completion.tag as u16;
    if let Some(place) = lists.get_mut(usize::from(slot)) {
        *place = Some(completion.data);
    }
    done(slot, completion.result.map_err(|error| error.to_string()));
}

impl Lane for InitiatorLane {
    fn submit(&mut self, slot: u16, write: bool, offset: u64) -> Result<()> {
        let list = self.lists.get_mut(usize::from(slot));
        let list = list.and_then(Option::take).context("a buffer is in use")?;
        let op = if write {
            Op::Write { fua: false }
        } else {
            Op::Read
        };
        let ended = self.queue.start(slot.into(), op, offset, list);
        self.refused.extend(ended);
        Ok(())
    }

    fn kick(&mut self) -> Result<()> {
        self.queue.push();
        Ok(())
    }

    fn poll(&mut self, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        let lists = &mut self.lists;
        let refused = self.refused.len();
        for completion in self.refused.drain(..) {
            end(lists, done, completion);
        }
        // Streams' completions are not the ring's to return.
        self.io.poll(&mut |_| {});
        let mut over = |completion| end(lists, done, completion);
        let count = self.queue.poll(&mut over);
        self.io.flush();
        Ok(refused + count)
    }

    fn wait(&mut self, _: Duration, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        self.poll(done)
    }

    fn put(&mut self, slot: u16, data: &[u8]) {
        // A failed write is detected when the data is read back.
        let _ = self.memory.write(usize::from(slot) * self.bytes, data);
    }

    fn get(&self, slot: u16, data: &mut [u8]) {
        let _ = self.memory.read(usize::from(slot) * self.bytes, data);
    }
}
