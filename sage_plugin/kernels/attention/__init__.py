"""The op family `attention`: public function, torch ops, decision, backends."""
