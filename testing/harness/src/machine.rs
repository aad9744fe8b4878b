//! Description of a guest, and its translation into QEMU's options.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use crate::cache::Cache;
use crate::guest::{BOOT_LIMIT, Guest, LIFE_LIMIT};
use crate::image::Image;
use crate::qemu::{Accel, Qemu};

/// A disk of the guest.
#[derive(Clone, Debug)]
pub enum Disk {
    /// A controller served by a vfio-user server at this socket.
    VfioUser {
        /// Path of the server's socket.
        socket: PathBuf,
    },
    /// QEMU's own NVMe controller on raw files, one namespace each: the comparison for ours.
    QemuNvme {
        /// The raw files.
        files: Vec<PathBuf>,
        /// Logical block size in bytes, 512 or 4096.
        block_size: u32,
        /// Whether the namespace refuses writes.
        read_only: bool,
    },
}

/// Firmware that starts the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Firmware {
    /// SeaBIOS, which reads NVMe disks itself.
    #[default]
    SeaBios,
    /// qboot: only starts a kernel that QEMU was given, a second sooner.
    Qboot,
    /// OVMF (UEFI).
    Ovmf,
}

/// Description of a guest to be started.
#[derive(Clone, Debug)]
pub struct GuestBuilder {
    pub(crate) name: String,
    memory_mib: u32,
    cpus: u32,
    disks: Vec<Disk>,
    viommu: bool,
    firmware: Firmware,
    append: Vec<String>,
    pub(crate) kernel: Option<PathBuf>,
    pub(crate) newer_kernel: bool,
    pub(crate) boot_disk: bool,
    pub(crate) incoming: bool,
    shared_memory: bool,
    pub(crate) programs: Vec<PathBuf>,
    printed: Vec<String>,
    extra: Vec<OsString>,
    pub(crate) accel: Option<Accel>,
    pub(crate) boot_limit: Duration,
    pub(crate) limit: Duration,
}

/// Kernel options that save boot time under TCG and cost nothing that a test looks at.
const APPEND: &str = "console=ttyS0 quiet panic=-1 tsc=reliable no_timer_check nokaslr mitigations=off \
     cryptomgr.notests init_on_alloc=0 audit=0 apparmor=0 ipv6.disable=1 \
     initcall_blacklist=load_system_certificate_list,jent_mod_init";

/// Serial number of the disk with programs of ours.
pub(crate) const PROGRAMS: &str = "vnvme-programs";

/// QEMU's ends of the harness's channels: QMP, a file for the console, and, with a `serial` device
/// for them, the ports `agent` and `events`.
pub(crate) fn channels(
    add: &mut impl FnMut(&[&str]),
    dir: &Path,
    console: &Path,
    serial: Option<&str>,
) {
    let socket = |name: &str| {
        let path = dir.join(name);
        format!("socket,id={name},path={},server=off", path.display())
    };
    let qmp = socket("qmp");
    add(&["-chardev", &qmp, "-mon", "chardev=qmp,mode=control"]);
    let file = format!("file,id=console,path={}", console.display());
    add(&["-chardev", &file, "-serial", "chardev:console"]);
    let Some(serial) = serial else { return };
    add(&["-device", serial]);
    for name in ["agent", "events"] {
        add(&["-chardev", &socket(name), "-device"]);
        add(&[&format!("virtserialport,chardev={name},name=vnvme.{name}")]);
    }
}

impl Guest {
    /// A guest to be; `name` names its logs.
    pub fn builder(name: &str) -> GuestBuilder {
        GuestBuilder {
            name: name.to_string(),
            memory_mib: 512,
            cpus: 2,
            disks: Vec::new(),
            viommu: false,
            firmware: Firmware::default(),
            append: Vec::new(),
            kernel: None,
            newer_kernel: false,
            boot_disk: false,
            incoming: false,
            shared_memory: true,
            programs: Vec::new(),
            printed: Vec::new(),
            extra: Vec::new(),
            accel: None,
            boot_limit: BOOT_LIMIT,
            limit: LIFE_LIMIT,
        }
    }
}

impl GuestBuilder {
    /// Sets the memory in MiB (default: 512).
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Sets the number of virtual processors (default: 2).
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Adds a disk.
    pub fn disk(mut self, disk: Disk) -> Self {
        self.disks.push(disk);
        self
    }

    /// Adds a disk served at a vfio-user socket.
    pub fn vfio_user(self, socket: impl Into<PathBuf>) -> Self {
        self.disk(Disk::VfioUser {
            socket: socket.into(),
        })
    }

    /// Puts an emulated Intel IOMMU in front of the devices.
    pub fn viommu(mut self) -> Self {
        self.viommu = true;
        self
    }

    /// Chooses the firmware.
    pub fn firmware(mut self, firmware: Firmware) -> Self {
        self.firmware = firmware;
        self
    }

    /// Adds words to the kernel's command line.
    pub fn append(mut self, words: &str) -> Self {
        self.append.push(words.to_string());
        self
    }

    /// Boots this `vmlinux` instead of the image's kernel. Debian's modules do not fit it.
    pub fn kernel(mut self, vmlinux: impl Into<PathBuf>) -> Self {
        self.kernel = Some(vmlinux.into());
        self
    }

    /// Boots a newer kernel of Debian's (trixie-backports) than the image's. Of its modules there
    /// are only those that a guest boots with.
    pub fn newer_kernel(mut self) -> Self {
        self.newer_kernel = true;
        self
    }

    /// Boots from the disks instead of from the harness's kernel. Such a guest has a
    /// console but runs no scripts.
    pub fn boot_from_disk(mut self) -> Self {
        self.boot_disk = true;
        self
    }

    /// Starts QEMU without a guest, which comes by [`Guest::migrate`] from another QEMU with the
    /// same machine and devices.
    pub fn incoming(mut self) -> Self {
        self.incoming = true;
        self
    }

    /// Gives the guest memory that no other process can map: wrong for
    /// vfio-user, and there to be refused.
    pub fn private_memory(mut self) -> Self {
        self.shared_memory = false;
        self
    }

    /// Takes machine, memory, processors and disks from the words of a command line that a page
    /// prints. `...` stands for the rest, which is the harness's own.
    pub fn printed(mut self, words: Vec<String>) -> Self {
        self.printed = words;
        self
    }

    /// Adds options to QEMU's command line.
    pub fn qemu_args<I: IntoIterator<Item = S>, S: Into<OsString>>(mut self, args: I) -> Self {
        self.extra.extend(args.into_iter().map(Into::into));
        self
    }

    /// Puts programs of ours into the guest's /tmp, with the library that they may need beyond the
    /// tools' (`LD_LIBRARY_PATH=/tools/lib:/tmp`). They are read from a disk: most of a program
    /// with all that a debugger needs is never read.
    pub fn programs(mut self, programs: &[PathBuf]) -> Self {
        self.programs.extend_from_slice(programs);
        self
    }

    /// Uses an accelerator without asking whether it works.
    pub fn accel(mut self, accel: Accel) -> Self {
        self.accel = Some(accel);
        self
    }

    /// Bounds each boot.
    pub fn boot_limit(mut self, limit: Duration) -> Self {
        self.boot_limit = limit;
        self
    }

    /// Bounds the guest's whole life; QEMU is killed after it.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// QEMU's command line.
    pub(crate) fn arguments(
        &self,
        cache: &Cache,
        image: &Image,
        accel: Accel,
        dir: &Path,
        console: &Path,
    ) -> Result<Vec<OsString>> {
        let mut args: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| args.extend(words.iter().map(OsString::from));
        add(&["-nodefaults", "-no-user-config", "-display", "none"]);
        match accel {
            Accel::Kvm if !self.printed.is_empty() => add(&["-cpu", "host"]),
            Accel::Kvm => add(&["-accel", "kvm", "-cpu", "host"]),
            Accel::Tcg => add(&["-accel", "tcg,thread=multi", "-cpu", "max"]),
        }
        let mut machine = String::from("q35");
        if self.viommu && accel == Accel::Kvm {
            machine.push_str(",kernel-irqchip=split");
        }
        let memory = self.memory_mib;
        if self.shared_memory && self.printed.is_empty() {
            machine.push_str(",memory-backend=m0");
            let object = format!("memory-backend-memfd,id=m0,size={memory}M,share=on");
            add(&["-object", &object]);
        }
        if self.printed.is_empty() {
            let (memory, cpus) = (format!("{memory}M"), self.cpus.to_string());
            add(&["-M", &machine, "-m", &memory, "-smp", &cpus]);
        }
        for word in self.printed.iter().skip(1).map(String::as_str) {
            match word {
                "..." => {}
                "-enable-kvm" if accel == Accel::Tcg => {}
                _ => add(&[word]),
            }
        }
        // A guest that reboots by itself has panicked; a wanted reboot lifts this for a moment.
        add(&["-action", "reboot=shutdown"]);
        if self.incoming {
            add(&["-incoming", "defer"]);
        }
        if self.viommu {
            add(&["-device", "intel-iommu,intremap=on,caching-mode=on"]);
        }
        channels(
            &mut add,
            dir,
            console,
            (!self.boot_disk).then_some("virtio-serial-pci"),
        );
        if !self.boot_disk {
            let tools = image.tools.display();
            add(&[
                "-drive",
                &format!("id=tools,if=none,format=raw,readonly=on,file={tools}"),
            ]);
            add(&["-device", "virtio-blk-pci,drive=tools,serial=vnvme-tools"]);
            if !self.programs.is_empty() {
                let file = image.programs(&self.programs, dir)?.display().to_string();
                let drive = format!("id=programs,if=none,format=raw,readonly=on,file={file}");
                let device = format!("virtio-blk-pci,drive=programs,serial={PROGRAMS}");
                add(&["-drive", &drive, "-device", &device]);
            }
            let mut append = String::from(APPEND);
            for words in self
                .append
                .iter()
                .map(String::as_str)
                .chain(self.viommu.then_some("intel_iommu=on"))
            {
                append.push(' ');
                append.push_str(words);
            }
            // The translator's counter is the host's. On a busy host the guest, interrupted while
            // it measures the counter's rate, finds a wrong one: then its clock runs fast, and its
            // time-outs expire early.
            if accel == Accel::Tcg && cfg!(target_arch = "x86_64") {
                let khz = (probes::cycles_per_second() / 1e3) as u64;
                append.push_str(&format!(" tsc_early_khz={khz}"));
            }
            let (kernel, initramfs) = (image.kernel.display(), image.initramfs.display());
            add(&[
                "-kernel",
                &kernel.to_string(),
                "-initrd",
                &initramfs.to_string(),
            ]);
            add(&["-append", &append]);
        }
        match self.firmware {
            Firmware::SeaBios => {}
            Firmware::Qboot => add(&["-bios", "qboot.rom"]),
            Firmware::Ovmf => {
                let (code, template) = Qemu::ovmf(cache)?;
                let vars = dir.join("ovmf-vars.fd");
                fs::copy(template, &vars)?;
                let flash = |unit: u32, file: &Path, more: &str| {
                    format!(
                        "if=pflash,unit={unit},format=raw,file={}{more}",
                        file.display()
                    )
                };
                add(&["-drive", &flash(0, &code, ",readonly=on")]);
                add(&["-drive", &flash(1, &vars, "")]);
            }
        }
        for (i, disk) in self.disks.iter().enumerate() {
            match disk {
                Disk::VfioUser { socket } => {
                    let device = json!({
                        "driver": "vfio-user-pci",
                        "id": format!("disk{i}"),
                        "socket": {"type": "unix", "path": socket},
                    });
                    add(&["-device", &device.to_string()]);
                }
                Disk::QemuNvme {
                    files,
                    block_size,
                    read_only,
                } => {
                    add(&["-device", &format!("nvme,id=disk{i},serial=qemu{i}")]);
                    for (j, file) in files.iter().enumerate() {
                        let node = format!("file{i}-{j}");
                        let blockdev = json!({
                            "driver": "raw",
                            "node-name": node,
                            "read-only": read_only,
                            "discard": "unmap",
                            "file": {"driver": "file", "filename": file, "discard": "unmap"},
                        });
                        add(&["-blockdev", &blockdev.to_string()]);
                        let namespace = format!(
                            "nvme-ns,bus=disk{i},drive={node},nsid={},logical_block_size={block_size},\
                             physical_block_size={block_size}",
                            j + 1
                        );
                        add(&["-device", &namespace]);
                    }
                }
            }
        }
        args.extend(self.extra.iter().cloned());
        Ok(args)
    }
}
