//! The files that the guest boots: the kernel, an initramfs with busybox and one script, and a
//! read-only tools image.
//!
//! The initramfs holds only files that are needed before the tools image is mounted, because every
//! byte of it costs boot time. The tools image (ext4, attached by virtio-blk) holds the programs
//! under test: nvme-cli, fio, e2fsprogs, xfsprogs, btrfs-progs, util-linux, with their libraries,
//! all kernel modules that a test may load, and a tree of ordinary files to copy.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cache::{self, Cache};
use crate::cpio::Archive;
use crate::kernel;
use crate::progress::say;
use crate::tree::{LINKER, PackageSet, Tree};

/// Changes when the way an image is made changes.
const RECIPE: &str = "image-1";

/// The guest's userland and kernel, and the programs that the host's own checks use.
const WISH: PackageSet = PackageSet {
    name: "guest",
    suites: &["trixie"],
    release: None,
    packages: &[
        "linux-image-cloud-amd64",
        "busybox-static",
        "nvme-cli",
        "fio",
        "e2fsprogs",
        "xfsprogs",
        "btrfs-progs",
        "util-linux",
        "kexec-tools",
        "xz-utils",
        "zstd",
        "dosfstools",
        "mtools",
    ],
    without: &[
        "adduser",
        "base-",
        "coreutils",
        "debconf",
        "dmsetup",
        "dpkg",
        "initramfs-tools",
        "kmod",
        "libapparmor",
        "libdb5",
        "libicu",
        "libpam",
        "libpython",
        "libsystemd-shared",
        "linux-base",
        "linux-sysctl",
        "login",
        "media-",
        "mount",
        "openssl-",
        "passwd",
        "perl",
        "python",
        "sensible",
        "systemd",
        "tar",
        "tzdata",
        "udev",
        "uuid-runtime",
    ],
};

/// Programs on the tools image.
const PROGRAMS: [&str; 19] = [
    "nvme",
    "fio",
    "mke2fs",
    "mkfs.ext4",
    "e2fsck",
    "fsck.ext4",
    "debugfs",
    "dumpe2fs",
    "tune2fs",
    "mkfs.xfs",
    "xfs_repair",
    "xfs_io",
    "mkfs.btrfs",
    "btrfs",
    "blkdiscard",
    "blockdev",
    "lsblk",
    "wipefs",
    "kexec",
];

/// Library that programs of ours may need beyond the tools' libraries.
pub(crate) const LIBRARY: &str = "libgcc_s.so.1";

/// Modules that the initramfs loads at boot, through which the tools image is read.
const BOOT_MODULES: [&str; 1] = ["virtio_blk"];

/// Modules on the tools image, for `modprobe`.
const MODULES: [&str; 11] = [
    "xfs",
    "btrfs",
    "vfio",
    "vfio-pci",
    "vfio_iommu_type1",
    "virtio_iommu",
    "virtio_net",
    "nvme-tcp",
    "nvmet",
    "nvmet-tcp",
    "ublk_drv",
];

/// Directories of the guest that the initramfs makes.
const DIRECTORIES: [&str; 14] = [
    "bin", "boot", "dev", "lib", "lib64", "mnt", "proc", "root", "run", "sbin", "sys", "tmp",
    "tools", "usr",
];

/// The files that a guest boots from.
#[derive(Clone, Debug)]
pub struct Image {
    /// An uncompressed kernel with a PVH entry point.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initramfs: PathBuf,
    /// The tools image, ext4.
    pub tools: PathBuf,
    /// The tree that all of it was made from.
    pub tree: Tree,
}

impl Image {
    /// The image from the cache, made (and its packages fetched) if it is not there.
    pub fn get(cache: &Cache) -> Result<Image> {
        let tree = Tree::fetch(cache, &WISH, |_| Ok(()))?;
        let recipe = format!("{PROGRAMS:?}{BOOT_MODULES:?}{MODULES:?}{DIRECTORIES:?}");
        let key = cache::key(&[
            RECIPE,
            &tree.id(),
            include_str!("../assets/init.sh"),
            &recipe,
        ]);
        let dir = cache.artefact("image", &key, |part| {
            say("image: kernel");
            fs::write(part.join("vmlinux"), kernel::vmlinux(&tree)?)?;
            say("image: initramfs");
            fs::write(part.join("initramfs.cpio"), initramfs(&tree)?)?;
            say("image: tools");
            tools(&tree, part)
        })?;
        cache.prune("image", &dir)?;
        let kernel = match std::env::var_os("VNVME_KERNEL").filter(|v| !v.is_empty()) {
            Some(path) => PathBuf::from(path),
            None => dir.join("vmlinux"),
        };
        if !kernel.is_file() {
            bail!("VNVME_KERNEL: {} is not a file", kernel.display());
        }
        Ok(Image {
            kernel,
            initramfs: dir.join("initramfs.cpio"),
            tools: dir.join("tools.ext4"),
            tree,
        })
    }
}

impl Image {
    /// Makes an image of programs of ours in a directory, with the library that they may need.
    pub(crate) fn programs(&self, programs: &[PathBuf], dir: &Path) -> Result<PathBuf> {
        let stage = dir.join("programs");
        fs::create_dir(&stage)?;
        for program in programs {
            let name = program.file_name().context("a program without a name")?;
            fs::copy(program, stage.join(name)).with_context(|| program.display().to_string())?;
            if let Some(library) = self.tree.libraries_of(program)?.get(LIBRARY) {
                fs::copy(library, stage.join(LIBRARY))?;
            }
        }
        let image = dir.join("programs.ext4");
        make_ext4(&self.tree, &stage, &image)?;
        Ok(image)
    }
}

/// A newer kernel for clouds: with PCI peer-to-peer memory, which the one of the image is without.
const NEWER_WISH: PackageSet = PackageSet {
    name: "kernel",
    suites: &["trixie", "trixie-backports"],
    release: Some("trixie-backports"),
    packages: &["linux-image-cloud-amd64", "xz-utils", "zstd"],
    without: &[
        "busybox",
        "coreutils",
        "cpio",
        "debconf",
        "dpkg",
        "dracut",
        "initramfs",
        "klibc",
        "kmod",
        "libklibc",
        "linux-base",
        "linux-sysctl",
        "logsave",
        "perl",
        "systemd",
        "tar",
        "udev",
    ],
};

impl Image {
    /// Returns the same image with the newer kernel, and the modules with which a guest boots.
    pub fn with_newer_kernel(mut self, cache: &Cache) -> Result<Image> {
        let tree = Tree::fetch(cache, &NEWER_WISH, |_| Ok(()))?;
        let base = fs::read(&self.initramfs)?;
        let recipe = format!("{BOOT_MODULES:?}");
        let image = self.initramfs.display().to_string();
        let key = cache::key(&[RECIPE, &tree.id(), &recipe, &image]);
        let dir = cache.artefact("newer", &key, |part| {
            say("image: newer kernel");
            fs::write(part.join("vmlinux"), kernel::vmlinux(&tree)?)?;
            let release = kernel::release(&tree)?;
            let mut archive = Archive::new();
            archive.directory(&format!("boot/{release}"));
            for (i, module) in kernel::modules(&tree, &BOOT_MODULES)?.iter().enumerate() {
                let path = format!("boot/{release}/{i:02}-{}.ko", module.name);
                archive.file(&path, 0o644, &module.bytes);
            }
            // Concatenated archives are read as a single one.
            let mut whole = base.clone();
            whole.resize(whole.len().next_multiple_of(512), 0);
            whole.extend(archive.finish());
            Ok(fs::write(part.join("initramfs.cpio"), whole)?)
        })?;
        cache.prune("newer", &dir)?;
        self.kernel = dir.join("vmlinux");
        self.initramfs = dir.join("initramfs.cpio");
        Ok(self)
    }
}

fn initramfs(tree: &Tree) -> Result<Vec<u8>> {
    let busybox = tree.program("busybox")?;
    let mut archive = Archive::new();
    for dir in DIRECTORIES {
        archive.directory(dir);
    }
    archive.character_device("dev/console", 5, 1);
    archive.character_device("dev/null", 1, 3);
    archive.file("bin/busybox", 0o755, &fs::read(&busybox)?);
    let applets = String::from_utf8(tree.run("busybox", &["--list"])?)?;
    for applet in applets.lines().filter(|a| *a != "busybox") {
        archive.symlink(&format!("bin/{applet}"), "busybox");
    }
    // The kernel asks for modules by /sbin/modprobe.
    archive.symlink("sbin/modprobe", "../bin/busybox");
    archive.symlink("usr/bin", "../bin");
    archive.symlink("lib/modules", "/tools/modules");
    archive.symlink(&format!("lib64/{LINKER}"), &format!("/tools/lib/{LINKER}"));
    let release = kernel::release(tree)?;
    archive.directory(&format!("boot/{release}"));
    for (i, module) in kernel::modules(tree, &BOOT_MODULES)?.iter().enumerate() {
        let path = format!("boot/{release}/{i:02}-{}.ko", module.name);
        archive.file(&path, 0o644, &module.bytes);
    }
    archive.file("init", 0o755, include_bytes!("../assets/init.sh"));
    Ok(archive.finish())
}

/// Fills a directory with the tools, and makes an ext4 image of it.
fn tools(tree: &Tree, part: &Path) -> Result<()> {
    let stage = part.join("stage");
    for dir in ["bin", "lib", "share"] {
        fs::create_dir_all(stage.join(dir))?;
    }
    let mut libraries = BTreeMap::new();
    for name in PROGRAMS {
        let program = tree.program(name)?;
        // mkfs.ext4 and the like are links; the copy keeps their names.
        fs::copy(&program, stage.join("bin").join(name))?;
        libraries.extend(tree.libraries_of(&program)?);
    }
    for (name, path) in &libraries {
        fs::copy(path, stage.join("lib").join(name))?;
    }
    modules(tree, &stage)?;
    copy_tree(&tree.root().join("usr/share"), &stage.join("share"))?;
    make_ext4(tree, &stage, &part.join("tools.ext4"))
}

/// Makes an ext4 image of a directory, which is removed.
fn make_ext4(tree: &Tree, stage: &Path, image: &Path) -> Result<()> {
    let bytes = size_of_tree(stage)?;
    let blocks = format!("{}k", bytes / 1024 * 6 / 5 + 16 * 1024);
    let (stage_name, image_name) = (stage.display().to_string(), image.display().to_string());
    tree.run(
        "mke2fs",
        &[
            "-q",
            "-t",
            "ext4",
            "-b",
            "4096",
            "-m",
            "0",
            "-O",
            "^has_journal",
            "-E",
            "root_owner=0:0",
            "-d",
            &stage_name,
            &image_name,
            &blocks,
        ],
    )?;
    fs::remove_dir_all(stage)?;
    Ok(())
}

/// The modules with the two indices that busybox's modprobe reads.
fn modules(tree: &Tree, stage: &Path) -> Result<()> {
    let dir = stage.join("modules").join(kernel::release(tree)?);
    fs::create_dir_all(&dir)?;
    let all = kernel::modules(tree, &MODULES)?;
    let depends: BTreeMap<&str, &[String]> = all
        .iter()
        .map(|m| (m.name.as_str(), m.depends.as_slice()))
        .collect();
    let (mut dep, mut alias) = (String::new(), String::new());
    for module in &all {
        fs::write(dir.join(format!("{}.ko", module.name)), &module.bytes)?;
        // modules.dep lists every dependency of every level, nearest first.
        let mut deep: Vec<&str> = Vec::new();
        let mut queue: Vec<&str> = module.depends.iter().map(String::as_str).collect();
        while let Some(name) = queue.pop() {
            if let Some(below) = depends.get(name) {
                deep.retain(|n| *n != name);
                deep.push(name);
                queue.extend(below.iter().map(String::as_str));
            }
        }
        let files: String = deep.iter().map(|n| format!(" {n}.ko")).collect();
        dep.push_str(&format!("{}.ko:{files}\n", module.name));
        for name in &module.aliases {
            alias.push_str(&format!("alias {name} {}\n", module.name));
        }
    }
    fs::write(dir.join("modules.dep"), dep)?;
    fs::write(dir.join("modules.alias"), alias)?;
    fs::write(dir.join("modules.symbols"), "")?;
    Ok(())
}

/// Copies directories, files and links.
fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy_tree(&source, &target)?;
        } else if kind.is_symlink() {
            symlink(fs::read_link(&source)?, &target)?;
        } else {
            fs::copy(&source, &target)?;
        }
    }
    Ok(())
}

/// Bytes that a tree's files take, counted in whole 4 KiB blocks.
fn size_of_tree(dir: &Path) -> Result<u64> {
    let mut sum = 4096;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        sum += if entry.file_type()?.is_dir() {
            size_of_tree(&entry.path())?
        } else {
            entry.metadata()?.len().next_multiple_of(4096)
        };
    }
    Ok(sum)
}
