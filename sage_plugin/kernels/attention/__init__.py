"""The op family `attention`: public function, torch op, and one folder a kernel."""
