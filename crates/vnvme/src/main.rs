//! Virtual NVMe disks for virtual machines, served from userspace.
fn main() {}
