//! NVMe controllers as targets, accessed through our driver: behind VFIO, behind a vfio-user
//! socket, or in this process.

use crate::job::{Doorbells, Job};
use crate::lane::{Geometry, IoResult, Lane, Target};
use anyhow::{Context, Result, anyhow, bail, ensure};
use controller::{Controller, ControllerConfig, NamespaceConfig};
use driver::{
    Completion, Device, DmaBuffer, Namespace, Op, Options, QueueOptions, QueuePair, Request,
};
use in_process::{self, Host};
use std::sync::Arc;
use std::time::Duration;
use volume::{Io, IoOptions, OpenOptions, Volume, open_url};

/// A namespace of an NVMe controller as a target of the load.
pub struct DeviceTarget {
    place: Attachment,
    geometry: Geometry,
    options: Options,
    interrupt: bool,
}

enum Attachment {
    /// A controller that any thread may use, and its namespace.
    Open(Device, Namespace),
    /// A controller in the thread that generates the load.
    Local(Local),
}

/// Configuration of a controller in this process.
#[derive(Clone)]
struct Local {
    volume: Arc<dyn Volume>,
    /// Whether the driver writes doorbells into a page that the controller polls; otherwise into
    /// shadow doorbells.
    mapped: bool,
}

impl Local {
    fn block_size(&self) -> u32 {
        self.volume.info().block_size.max(512)
    }

    fn host(&self) -> Result<Host> {
        let io = Io::new(IoOptions::default());
        let config = ControllerConfig {
            mapped_doorbells: self.mapped,
            ..ControllerConfig::default()
        };
        let namespace = NamespaceConfig {
            block_size: self.block_size(),
            read_only: self.volume.info().read_only,
            nguid: [1; 16],
            eui64: [1; 8],
            ..NamespaceConfig::new(1, self.volume.clone())
        };
        let controller = Controller::new(0, config, vec![namespace], &io)?;
        Ok(Host::new(controller, io)?)
    }
}

/// Returns the driver's options for a job.
fn driver_options(job: &Job) -> Options {
    let mut options = Options {
        io_queues: job.queues,
        interrupts: job.interrupt,
        memory: job.memory.clone(),
        ..Options::default()
    };
    options.doorbells.shadow = job.doorbells == Doorbells::Shadow;
    options
}

impl DeviceTarget {
    /// Initialises the controller of `url` for this job.
    pub fn open(url: &str, job: &Job) -> Result<Self> {
        let options = driver_options(job);
        if driver::DeviceTarget::is_named_by(url) {
            let mut target = driver::DeviceTarget::parse(url)?;
            target.options = Options {
                max_transfer: target.options.max_transfer,
                sgl: target.options.sgl,
                command_timeout: target.options.command_timeout,
                ..options.clone()
            };
            let device = target.open()?;
            return Self::over(url, device, target.nsid, options, job);
        }
        let read_only = !job.rw.writes();
        let volume = open_url(
            url,
            OpenOptions {
                read_only,
                ..OpenOptions::default()
            },
        )?;
        Self::of_volume(url, volume, job)
    }

    /// Creates a controller in this process over a volume. `url` is the volume's name in messages.
    pub fn of_volume(url: &str, volume: Arc<dyn Volume>, job: &Job) -> Result<Self> {
        let options = driver_options(job);
        let local = Local {
            volume,
            mapped: job.doorbells == Doorbells::Mmio,
        };
        if job.queues > 1 || job.interrupt {
            // Several threads reach a controller only in a thread of its own.
            let transport = in_process::spawn(move || local.host())?;
            let device = Device::open(transport, options.clone())?;
            return Self::over(url, device, 1, options, job);
        }
        let info = local.volume.info();
        Ok(Self {
            geometry: Geometry {
                size: info.size,
                block_size: local.block_size(),
                description: format!(
                    "{url}: {}, behind a controller in the thread that loads it",
                    info.description
                ),
            },
            place: Attachment::Local(local),
            options,
            interrupt: false,
        })
    }

    fn over(url: &str, device: Device, nsid: u32, options: Options, job: &Job) -> Result<Self> {
        let namespace = device.namespace(nsid).with_context(|| url.to_owned())?;
        let identify = device.identify();
        let doorbells = match (options.doorbells.shadow, device.limits().doorbell_buffers) {
            (true, true) => ", shadow doorbells",
            (true, false) => ", shadow doorbells not offered",
            (false, _) => "",
        };
        let description = format!(
            "{url}: {}, firmware {}, {} blocks of {} bytes{doorbells}",
            identify.mn,
            identify.fr,
            namespace.blocks,
            namespace.block_size(),
        );
        Ok(Self {
            geometry: Geometry {
                size: namespace.bytes(),
                block_size: namespace.block_size(),
                description,
            },
            place: Attachment::Open(device, namespace),
            options,
            interrupt: job.interrupt,
        })
    }
}

impl Target for DeviceTarget {
    type Lane = DeviceLane;

    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn lane(&self, _index: u16, depth: u16, bytes: usize) -> Result<DeviceLane> {
        let options = QueueOptions {
            depth: depth.into(),
            interrupts: self.interrupt,
            // A job with interrupts must see their cost.
            poll_window: Duration::ZERO,
            ..QueueOptions::default()
        };
        let (device, namespace) = match &self.place {
            Attachment::Open(device, namespace) => (device.clone(), *namespace),
            Attachment::Local(local) => {
                let device = Device::open(in_process::local(local.host()?), self.options.clone())?;
                let namespace = device.namespace(1)?;
                (device, namespace)
            }
        };
        let queue = device.queue(namespace.nsid, options)?;
        ensure!(
            queue.depth() >= usize::from(depth),
            "the controller's queues hold {} commands at most",
            queue.depth()
        );
        let buffers = (0..depth).map(|_| device.allocate(bytes).map(Some));
        let blocks = bytes as u64 >> namespace.block_shift;
        if blocks == 0 || blocks << namespace.block_shift != bytes as u64 {
            bail!("{bytes} bytes are not a whole number of blocks");
        }
        Ok(DeviceLane {
            buffers: buffers.collect::<Result<_, _>>()?,
            shift: namespace.block_shift,
            blocks: u32::try_from(blocks)?,
            whole: blocks <= u64::from(queue.max_blocks()),
            queue,
        })
    }
}

/// A queue pair of the controller, through which one thread of the load runs its I/O.
pub struct DeviceLane {
    queue: QueuePair,
    /// Data buffers of the slots that have no I/O in flight.
    buffers: Vec<Option<DmaBuffer>>,
    shift: u8,
    /// Number of blocks of one I/O.
    blocks: u32,
    /// Whether a single command carries an I/O.
    whole: bool,
}

#[inline]
fn end(
    buffers: &mut [Option<DmaBuffer>],
    done: &mut impl FnMut(u16, IoResult),
    completion: Completion,
) {
    let slot = completion.user_data as u16;
    // A deallocation has none.
    if let (Some(place), Some(buffer)) = (buffers.get_mut(usize::from(slot)), completion.buffer) {
        *place = Some(buffer);
    }
    done(slot, completion.result.map_err(|error| error.to_string()));
}

impl Lane for DeviceLane {
    #[inline]
    fn submit(&mut self, slot: u16, write: bool, offset: u64) -> Result<()> {
        let buffer = self
            .buffers
            .get_mut(usize::from(slot))
            .and_then(Option::take);
        let buffer = buffer.ok_or_else(|| anyhow!("buffer {slot} is in use"))?;
        let (lba, user_data) = (offset >> self.shift, u64::from(slot));
        let refused = match (self.whole, write) {
            (true, false) => self.queue.submit_read(lba, self.blocks, buffer, user_data),
            (true, true) => self
                .queue
                .submit_write(lba, self.blocks, buffer, false, user_data),
            (false, _) => self.queue.submit(Request {
                op: if write {
                    Op::Write { fua: false }
                } else {
                    Op::Read
                },
                lba,
                blocks: self.blocks.into(),
                buffer: Some(buffer),
                user_data,
            }),
        };
        Ok(refused?)
    }

    fn trim(&mut self, slot: u16, offset: u64) -> Result<()> {
        let request = Request {
            op: Op::Deallocate,
            lba: offset >> self.shift,
            blocks: self.blocks.into(),
            buffer: None,
            user_data: u64::from(slot),
        };
        Ok(self.queue.submit(request)?)
    }

    #[inline]
    fn kick(&mut self) -> Result<()> {
        self.queue.ring();
        Ok(())
    }

    #[inline]
    fn poll(&mut self, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        let buffers = &mut self.buffers;
        Ok(self.queue.poll(|completion| end(buffers, done, completion)))
    }

    #[inline]
    fn look(&mut self, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        let buffers = &mut self.buffers;
        let done = |completion| end(buffers, done, completion);
        Ok(self.queue.poll_restless(done))
    }

    fn wait(&mut self, limit: Duration, done: &mut impl FnMut(u16, IoResult)) -> Result<usize> {
        let buffers = &mut self.buffers;
        Ok(self
            .queue
            .wait(limit, |completion| end(buffers, done, completion))?)
    }

    fn put(&mut self, slot: u16, data: &[u8]) {
        if let Some(Some(buffer)) = self.buffers.get(usize::from(slot)) {
            // A failed write to the buffer shows when its data is read back.
            let _ = buffer.write(0, data);
        }
    }

    fn get(&self, slot: u16, data: &mut [u8]) {
        if let Some(Some(buffer)) = self.buffers.get(usize::from(slot)) {
            let _ = buffer.read(0, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Rw;
    use crate::run;

    fn job() -> Job {
        Job {
            rw: Rw::RandMixed,
            depth: 9,
            ios: Some(1000),
            verify: true,
            ..Job::default()
        }
    }

    #[test]
    fn in_process_controller_keeps_written_data() {
        for doorbells in [Doorbells::Shadow, Doorbells::Mmio] {
            for (queues, interrupt) in [(1, false), (2, false), (1, true)] {
                // 1 MiB and more is split; 4 KiB is one command.
                for bs in [4096, 2 << 20] {
                    let job = Job {
                        doorbells,
                        queues,
                        interrupt,
                        bs,
                        ios: Some(if bs > 4096 { 40 } else { 1000 }),
                        ..job()
                    };
                    let target = DeviceTarget::open("mem://32M", &job).unwrap();
                    let measured = run(&target, &job, &mut ()).unwrap();
                    let ios = job.ios.unwrap_or(0) * u64::from(queues);
                    assert_eq!(measured.read.ios + measured.write.ios, ios);
                    assert!(measured.verified > 0);
                }
            }
        }
    }

    #[test]
    fn deallocated_blocks_read_as_zeroes() {
        let write = Job {
            rw: Rw::Write,
            ios: Some(256),
            verify: true,
            ..job()
        };
        let trim = Job {
            rw: Rw::Trim,
            ios: Some(128),
            verify: false,
            ..job()
        };
        let target = DeviceTarget::open("mem://1M", &write).unwrap();
        run(&target, &write, &mut ()).unwrap();
        let measured = run(&target, &trim, &mut ()).unwrap();
        assert_eq!((measured.trim.ios, measured.write.ios), (128, 0));
        assert_eq!(measured.trim.bytes, 512 << 10);
        let mut lane = target.lane(0, 1, 4096).unwrap();
        let mut data = vec![1; 4096];
        for (offset, zero) in [(0, true), (508 << 10, true), (512 << 10, false)] {
            lane.submit(0, false, offset).unwrap();
            lane.kick().unwrap();
            let mut ended = 0;
            while ended == 0 {
                ended = lane.poll(&mut |_, outcome| outcome.unwrap()).unwrap();
            }
            lane.get(0, &mut data);
            assert_eq!(data.iter().all(|byte| *byte == 0), zero, "at {offset}");
        }
    }

    #[test]
    fn disk_losing_writes_is_detected() {
        let target = DeviceTarget::open("null://1M", &job()).unwrap();
        let error = run(&target, &job(), &mut ()).unwrap_err().to_string();
        assert!(error.contains("wrong data"), "{error}");
    }

    #[test]
    fn missing_device_is_error() {
        for url in [
            "vfio-user:///no/such.sock/1",
            "nvme://0000:ff:1f.7/1",
            "tape://0",
        ] {
            assert!(DeviceTarget::open(url, &job()).is_err(), "{url}");
        }
    }
}
