//! Live migration of an NVMe controller's guest over vfio-user: the states of the device, and the
//! lock of its volume.
//!
//! The controller fetches commands only in state RUNNING, and only with the lock. The source
//! releases the lock on its way to STOP_COPY, after a flush; the destination takes it on its way to
//! RUNNING. A cancelled migration leads the source back to RUNNING, and so to the lock.

use super::device::{NvmeDevice, WaitReason};
use controller::{Controller, MAX_STREAM, NamespaceConfig};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::Waker;
use std::time::Duration;
use vfio_user::{Migration, MigrationState, OperationOutcome};
use volume::{Change, Ownership, Volume};

/// Maximum time for which a started disk waits until another process has released its volume.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// Volume whose lock can be handed to another process, and the disk's part in that.
pub struct HandOver {
    /// Only volume of the disk.
    pub volume: Arc<dyn Volume>,
    /// Whether the disk releases the lock when it has no client (option `incoming`). One that has
    /// released it once does so in any case.
    pub is_incoming: bool,
    /// Shown to other threads: another process may write the volume.
    pub shown: Arc<AtomicBool>,
}

/// Step of a change of the state that has begun and not ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// None: the next one can begin.
    No,
    /// Outstanding commands end.
    Drain,
    /// The lock is being taken.
    Take,
    /// Data are flushed and the lock is released.
    Release,
    /// The controller is reset.
    Reset,
}

/// State of a device that can migrate.
pub struct LiveMigration {
    ownership: Ownership,
    state: MigrationState,
    /// State that the client has requested last.
    wanted: MigrationState,
    step: Step,
    /// Result of the last attempt to take the lock, if it was refused.
    refused: bool,
    /// Whether no other process can continue with the client at present.
    has_suspended: bool,
    /// State of the controller: what is left to be read, or what was written.
    stream: Vec<u8>,
    /// Number of bytes of the stream that were read.
    read: usize,
}

impl LiveMigration {
    /// Creates the state of a device for the volume's lock. `waker` wakes the device's worker. The
    /// controller is paused if the disk does not have the lock.
    pub fn new(hand_over: HandOver, waker: Waker, controller: &mut Controller) -> Self {
        let HandOver {
            volume,
            is_incoming,
            shown,
        } = hand_over;
        let mut ownership = Ownership::new(volume, LOCK_TIMEOUT, waker, shown);
        if is_incoming {
            ownership.set_incoming();
        }
        if !ownership.is_held() {
            controller.pause();
        }
        let mut live = LiveMigration {
            ownership,
            state: MigrationState::Running,
            wanted: MigrationState::Running,
            step: Step::No,
            refused: false,
            has_suspended: false,
            stream: Vec::new(),
            read: 0,
        };
        live.suspend_survival(controller);
        live
    }

    /// Lets no other process continue with the client while the guest migrates, and while the disk
    /// does not have the lock, which that process would have to take first.
    fn suspend_survival(&mut self, controller: &mut Controller) {
        let is_suspended = self.state != MigrationState::Running
            || controller.is_logging()
            || !self.ownership.is_held();
        if std::mem::replace(&mut self.has_suspended, is_suspended) != is_suspended {
            controller.suspend_survival(is_suspended);
        }
    }

    /// Returns whether the device can migrate with this controller: its only namespace is on the
    /// volume whose lock can be handed over.
    fn can_migrate(&self, controller: &Controller) -> bool {
        controller.cannot_migrate().is_none() && controller.is_only_volume(self.ownership.volume())
    }

    /// Returns whether the volume's namespace was detached, and no migration is in progress: nobody
    /// waits for the lock, and the volume has to be closed.
    pub fn has_lost_volume(&self, controller: &Controller) -> bool {
        let volume = self.ownership.volume();
        let has_it = |ns: &NamespaceConfig| Arc::ptr_eq(&ns.volume, volume);
        let is_idle = self.state == MigrationState::Running && self.step == Step::No;
        is_idle && !controller.namespaces().any(has_it)
    }

    /// Returns whether requests of the migration are accepted: the device can migrate, or a
    /// migration has begun, which has to be ended even if the device cannot migrate any more.
    pub fn is_offered(&self, controller: &Controller) -> bool {
        self.state != MigrationState::Running
            || self.step != Step::No
            || controller.is_logging()
            || self.can_migrate(controller)
    }

    /// Returns whether the guest waits for the lock outside of a migration: it uses a disk that has
    /// not taken its lock, or has handed it over.
    pub fn lacks_lock(&self, controller: &Controller) -> bool {
        self.state == MigrationState::Running && !self.ownership.is_held() && controller.is_ready()
    }

    /// Returns whether the disk has the lock and keeps it without a client.
    pub fn keeps_lock(&self) -> bool {
        self.ownership.is_kept()
    }

    /// Returns whether the guest may wait for the lock when a reset of the controller has ended,
    /// because it has enabled the controller meanwhile.
    pub fn may_lack_lock(&self, controller: &Controller) -> bool {
        self.state == MigrationState::Running
            && !self.ownership.is_held()
            && controller.is_resetting()
    }

    /// Continues what goes on without a request of the client: a guest without the lock gets it,
    /// and an incoming disk without a client gives it back. Returns whether anything is left to do.
    pub fn settle(&mut self, controller: &mut Controller, has_client: bool) -> bool {
        if self.state != MigrationState::Running || self.step != Step::No {
            return false;
        }
        self.advance_lock(controller);
        if self.lacks_lock(controller) {
            if std::mem::take(&mut self.refused) {
                controller.refuse_host("another process has the volume");
                return false;
            }
            self.ownership.take();
            return true;
        }
        // The guest does not wait any more. Its next start is another attempt.
        self.refused = false;
        if !has_client && self.ownership.is_idle() {
            if controller.is_resetting() {
                return true;
            }
            if self.ownership.release() {
                controller.begin_hand_over();
            }
        }
        if self.ownership.is_held() && controller.is_paused() {
            controller.check_sizes();
            controller.unpause();
        }
        self.ownership.deadline().is_some()
            || self.ownership.is_waiting()
            || self.may_lack_lock(controller)
    }

    /// Advances the flush before the release, and the thread that works on the lock.
    fn advance_lock(&mut self, controller: &mut Controller) {
        if let Some(result) = controller.hand_over_result() {
            let result = result.map_err(|status| format!("the flush failed: {status:?}"));
            self.ownership.flushed(result);
        } else if self.ownership.is_flushing()
            && !controller.is_handing_over()
            && !controller.is_resetting()
        {
            // A reset has ended the flush.
            controller.begin_hand_over();
        }
        if !self.ownership.is_held() {
            controller.pause();
        }
        match self.ownership.advance() {
            Some(Change::Taken) => tracing::info!("the volume was taken over"),
            Some(Change::Released) => {
                tracing::info!("the volume was released for another process");
            }
            Some(Change::Refused(why)) => {
                tracing::error!("the volume cannot be taken over: {why}");
                self.refused = true;
            }
            None => {}
        }
        self.suspend_survival(controller);
    }

    /// Resets the state when the device is reset, or its client has left.
    pub fn reset(&mut self, controller: &mut Controller) {
        self.state = MigrationState::Running;
        self.wanted = MigrationState::Running;
        self.step = Step::No;
        self.refused = false;
        self.forget_stream();
        if self.ownership.is_held() {
            controller.unpause();
        }
        self.suspend_survival(controller);
    }

    fn forget_stream(&mut self) {
        self.stream = Vec::new();
        self.read = 0;
    }

    /// Continues the change to the wanted state. Returns its result when it has ended.
    pub fn advance(&mut self, controller: &mut Controller) -> Option<Result<(), Errno>> {
        loop {
            self.advance_lock(controller);
            let Some(next) = self.state.next(self.wanted) else {
                return Some(Err(Errno::INVAL));
            };
            if next == self.state {
                return Some(Ok(()));
            }
            match self.go_to(next, controller) {
                Ok(true) => {
                    self.step = Step::No;
                    self.state = next;
                    tracing::debug!(state = ?next, "migration");
                }
                Ok(false) => return None,
                Err(errno) => {
                    self.step = Step::No;
                    return Some(Err(errno));
                }
            }
        }
    }

    /// Goes along one arc of the states. Returns whether the state is reached.
    fn go_to(&mut self, next: MigrationState, controller: &mut Controller) -> Result<bool, Errno> {
        match (self.state, next) {
            (MigrationState::Running, _) => self.stop(controller),
            (MigrationState::StopCopy, _) => {
                self.forget_stream();
                Ok(true)
            }
            (MigrationState::Resuming, _) => self.load(controller),
            (_, MigrationState::StopCopy | MigrationState::Resuming)
                if self.step == Step::No && !self.can_migrate(controller) =>
            {
                Err(Errno::NOTSUP)
            }
            (_, MigrationState::StopCopy) => self.save(controller),
            (_, MigrationState::Resuming) => {
                if self.step == Step::No {
                    self.step = Step::Reset;
                    controller.reset();
                }
                self.forget_stream();
                Ok(!controller.is_resetting())
            }
            _ => self.run(controller),
        }
    }

    fn stop(&mut self, controller: &mut Controller) -> Result<bool, Errno> {
        if self.step == Step::No {
            self.step = Step::Drain;
            controller.pause();
        }
        if let Some(why) = controller.is_busy_for_migration() {
            tracing::warn!(why, "the guest cannot migrate now");
            if self.ownership.is_held() {
                controller.unpause();
            }
            return Err(Errno::BUSY);
        }
        Ok(controller.is_quiet())
    }

    fn save(&mut self, controller: &mut Controller) -> Result<bool, Errno> {
        if self.step == Step::No && self.ownership.is_held() {
            self.step = Step::Release;
            if !self.ownership.release() {
                // An earlier flush has failed.
                return Err(Errno::IO);
            }
            controller.begin_hand_over();
        }
        self.advance_lock(controller);
        if self.ownership.is_flushing() || self.ownership.is_waiting() {
            return Ok(false);
        }
        if self.ownership.is_held() {
            // The flush has failed, and the log says so.
            return Err(Errno::IO);
        }
        self.stream = controller.save_stream().map_err(|error| {
            tracing::error!(%error, "the state of the guest's disk cannot be saved");
            Errno::IO
        })?;
        self.read = 0;
        Ok(true)
    }

    fn load(&mut self, controller: &mut Controller) -> Result<bool, Errno> {
        let loaded = controller.load_stream(&self.stream);
        self.forget_stream();
        loaded.map(|()| true).map_err(|error| {
            let error: &dyn std::error::Error = &error;
            tracing::error!(error, "the state of a guest that migrates here is refused");
            // The reset removes what was restored before the error.
            controller.reset();
            self.state = MigrationState::Error;
            Errno::INVAL
        })
    }

    fn run(&mut self, controller: &mut Controller) -> Result<bool, Errno> {
        if !self.ownership.is_held() {
            if self.step == Step::No {
                self.step = Step::Take;
                self.refused = false;
                self.ownership.take();
            }
            self.advance_lock(controller);
            if std::mem::take(&mut self.refused) {
                return Err(Errno::BUSY);
            }
        }
        if !self.ownership.take() {
            return Ok(false);
        }
        controller.check_sizes();
        controller.unpause();
        Ok(true)
    }
}

impl NvmeDevice {
    fn suspend_survival(&mut self) {
        if let Some(live) = &mut self.live {
            live.suspend_survival(&mut self.controller);
        }
    }
}

impl Migration for NvmeDevice {
    fn state(&self) -> MigrationState {
        let live = self.live.as_ref();
        live.map_or(MigrationState::Running, |live| live.state)
    }

    fn set_state(&mut self, wanted: MigrationState) -> Result<OperationOutcome, Errno> {
        let Some(live) = &mut self.live else {
            return Err(Errno::NOTSUP);
        };
        live.wanted = wanted;
        match live.advance(&mut self.controller) {
            Some(result) => result.map(|()| OperationOutcome::Done),
            None => Ok(self.wait_for_migration()),
        }
    }

    fn read_state(&mut self, data: &mut [u8]) -> Result<usize, Errno> {
        let live = self.live.as_mut().ok_or(Errno::NOTSUP)?;
        let rest = live.stream.get(live.read..).unwrap_or_default();
        let count = rest.len().min(data.len());
        let (Some(to), Some(from)) = (data.get_mut(..count), rest.get(..count)) else {
            return Ok(0);
        };
        to.copy_from_slice(from);
        live.read += count;
        Ok(count)
    }

    fn write_state(&mut self, data: &[u8]) -> Result<(), Errno> {
        let live = self.live.as_mut().ok_or(Errno::NOTSUP)?;
        if data.len() > MAX_STREAM.saturating_sub(live.stream.len()) {
            return Err(Errno::FBIG);
        }
        live.stream.extend_from_slice(data);
        Ok(())
    }

    fn start_log(&mut self) -> Result<OperationOutcome, Errno> {
        if self.controller.is_logging() {
            return Err(Errno::BUSY);
        }
        self.controller.start_dirty_log();
        self.suspend_survival();
        // Writes of outstanding commands are in no log, and the VMM copies them after the answer.
        Ok(self.outcome(WaitReason::Unmap))
    }

    fn stop_log(&mut self) -> Result<(), Errno> {
        if !self.controller.is_logging() {
            return Err(Errno::INVAL);
        }
        self.controller.stop_dirty_log();
        self.suspend_survival();
        Ok(())
    }

    fn take_dirty(
        &mut self,
        iova: u64,
        length: u64,
        each: &mut dyn FnMut(u64),
    ) -> Result<(), Errno> {
        if !self.controller.is_logging() {
            return Err(Errno::INVAL);
        }
        self.controller.take_dirty(iova, length, each);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use controller::{ControllerConfig, NamespaceConfig};
    use dma::{Memory, Prot};
    use nvme::regs::{self, Aqa, Cc, Csts};
    use std::path::Path;
    use std::time::Instant;
    use volume::{FileOptions, FileVolume, Io, IoOptions, OpenOptions, Registry};

    const MEMORY: u64 = 1 << 16;

    fn incoming(path: &Path) -> Arc<dyn Volume> {
        let options = OpenOptions {
            incoming: true,
            ..OpenOptions::default()
        };
        let opened = Registry::<()>::new().open(path.to_str().unwrap(), options);
        opened.unwrap().volume
    }

    /// An incoming disk with a client, which gives up at once if the lock is not free.
    struct Disk {
        live: LiveMigration,
        controller: Controller,
        io: Io,
    }

    impl Disk {
        fn new(volume: Arc<dyn Volume>) -> Self {
            let io = Io::new(IoOptions::default());
            let namespaces = vec![NamespaceConfig::new(1, volume.clone())];
            let mut controller =
                Controller::new(1, ControllerConfig::default(), namespaces, &io).unwrap();
            let memory = Memory::anonymous(MEMORY as usize).unwrap();
            let backing = Some((memory, 0));
            controller.dma_map(0, MEMORY, backing, Prot::RW).unwrap();
            controller.config_write(4, &[6, 0]);
            let hand_over = HandOver {
                volume: volume.clone(),
                is_incoming: true,
                shown: Arc::default(),
            };
            let mut live = LiveMigration::new(hand_over, Waker::noop().clone(), &mut controller);
            let waker = Waker::noop().clone();
            live.ownership = Ownership::new(volume, Duration::ZERO, waker, Arc::default());
            Disk {
                live,
                controller,
                io,
            }
        }

        fn enable(&mut self, is_enabled: bool) {
            let aqa = Aqa::new().with_asqs_z(31).with_acqs_z(31);
            let cc = Cc::new().with_en(is_enabled).with_iosqes(6).with_iocqes(4);
            let c = &mut self.controller;
            c.bar0_write(regs::AQA, &aqa.into_bits().to_le_bytes());
            c.bar0_write(regs::ASQ, &0x1000u64.to_le_bytes());
            c.bar0_write(regs::ACQ, &0x2000u64.to_le_bytes());
            c.bar0_write(regs::CC, &cc.into_bits().to_le_bytes());
        }

        /// Continues until nothing is left to do. Returns CSTS.
        fn settle(&mut self) -> Csts {
            let limit = Instant::now() + Duration::from_secs(60);
            while self.live.settle(&mut self.controller, true) {
                self.io
                    .poll(&mut |completion| self.controller.complete(completion));
                self.controller.poll(Instant::now());
                assert!(Instant::now() < limit);
                std::thread::yield_now();
            }
            let mut csts = [0; 4];
            self.controller.bar0_read(regs::CSTS, &mut csts);
            Csts::from_bits(u32::from_le_bytes(csts))
        }
    }

    #[test]
    fn refusal_concerns_the_guest_that_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        std::fs::File::create(&path)
            .unwrap()
            .set_len(1 << 20)
            .unwrap();
        let other = FileVolume::open(&path, FileOptions::default()).unwrap();
        let mut disk = Disk::new(incoming(&path));
        assert!(!disk.settle().cfs());
        disk.enable(true);
        assert!(disk.settle().cfs() && disk.controller.is_paused());
        disk.enable(false);
        assert!(!disk.settle().cfs());
        // The guest gives up before the refusal is known.
        disk.enable(true);
        assert!(disk.live.settle(&mut disk.controller, true));
        disk.enable(false);
        disk.settle();
        drop(other);
        disk.enable(true);
        let csts = disk.settle();
        assert!(csts.rdy() && !csts.cfs() && !disk.controller.is_paused());
    }
}
